"""LapEigValRAUQ, LogDetRAUQ, AttentionScore and the token scores against the dense reference, on both hosts."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from tiny import tiny_bridge, tiny_model
from uncertainty import dense

import attnprobe as ap
from attnprobe.uncertainty import Evidence, method_names

PROMPT = [5, 9, 23, 44, 8, 61, 12, 17, 33, 70, 21]
SHORT = [11, 6, 15, 9]
HOSTS = ("bridge", "transformers")
NEW = ("LapEigValRAUQ", "LogDetRAUQ", "AttentionScore", "MaximumSequenceProbability", "MaximumTokenEntropy")


@functools.cache
def model(host: str, name: str = "llama", **changes):
    made = tiny_bridge(name, **changes) if host == "bridge" else tiny_model(name, attention="sdpa", **changes)
    if host == "transformers":
        made.generation_config.eos_token_id = changes.get("eos_token_id")
    return made


@functools.cache
def eager(name: str, **changes):
    return tiny_model(name, **changes)


def reference(score, name: str = "llama", **changes) -> dense.Text:
    return dense.read_text(eager(name, **changes), score.prompt_ids, score.token_ids)


def variants() -> list:
    """Every setting of the new scores, and what the reference says of a text."""
    laplacian, determinant = dense.mean_laplacian_eigenvalue, dense.geometric_mean_self_attention
    once = functools.partial(laplacian, clip="mean")
    kept = functools.partial(determinant, epsilon=1e-3)
    return [
        (ap.LapEigValRAUQ(), lambda text: dense.sauq(text, signal=laplacian)),
        (ap.LapEigValRAUQ(clip="mean"), lambda text: dense.sauq(text, signal=once)),
        (
            ap.LapEigValRAUQ(0.5, "all", screen="mean"),
            lambda text: dense.sauq(text, alpha=0.5, layers=range(3), screen="mean", signal=laplacian),
        ),
        (ap.LogDetRAUQ(), lambda text: dense.sauq(text, signal=determinant)),
        (ap.LogDetRAUQ(epsilon=1e-3), lambda text: dense.sauq(text, signal=kept)),
        (
            ap.LogDetRAUQ(0.5, [0, 2], screen="mean"),
            lambda text: dense.sauq(text, alpha=0.5, layers=[0, 2], screen="mean", signal=determinant),
        ),
        (ap.AttentionScore(), lambda text: (dense.attention_score(text), [])),
        (ap.AttentionScore(0), lambda text: (dense.attention_score(text, layer=0), [])),
        (ap.AttentionScore(2, True), lambda text: (dense.attention_score(text, layer=2, generation_only=True), [])),
        (ap.AttentionScore(generation_only=True), lambda text: (dense.attention_score(text, generation_only=True), [])),
        (ap.MaximumSequenceProbability(), lambda text: (dense.maximum_sequence_probability(text), [])),
        (ap.MaximumTokenEntropy(), lambda text: (dense.maximum_token_entropy(text), [])),
    ]


def assert_is_the_reference(score, name: str = "llama", **changes) -> None:
    text = reference(score, name, **changes)
    for method, expected in variants():
        uncertainty, layers = expected(text)
        found = score.uncertainty[method.name]
        assert found == pytest.approx(uncertainty, abs=1e-4, rel=1e-6), method.name
        dense.assert_same_layers(score.assessments[method.name], layers, 1e-4)


def methods() -> list:
    return [method for method, _ in variants()]


def test_the_names_of_the_settings_differ():
    names = [method.name for method in methods()]
    assert len(set(names)) == len(names)
    assert set(NEW) <= set(names)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "qwen2"])
def test_every_setting_equals_the_dense_reference_in_a_ragged_batch(host, name):
    """Also where LM-Polygraph is off: it gives all of a batch the first one's attention, and reads padding unmasked."""
    scores = ap.score(model(host, name), [PROMPT, SHORT, [7]], methods=methods(), max_new_tokens=9)
    for score in scores:
        assert_is_the_reference(score, name)
    assert len({score.uncertainty["AttentionScore"] for score in scores}) == 3


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("n", [1, 2])
def test_answers_of_one_and_two_tokens(host, n):
    for score in ap.score(model(host), [PROMPT, SHORT], methods=methods(), max_new_tokens=n):
        assert len(score.token_ids) == n
        assert_is_the_reference(score)
        if n == 1:
            assert score.uncertainty["AttentionScore-generation"] == 0.0
            # nothing is carried over
            surprise = score.uncertainty["MaximumSequenceProbability"]
            assert score.uncertainty["LogDetRAUQ"] == score.uncertainty["LapEigValRAUQ"] == 1 + surprise


@pytest.mark.parametrize("host", HOSTS)
def test_an_answer_longer_than_every_buffer_on_the_way(host):
    for score in ap.score(model(host, eos_token_id=None), [PROMPT, SHORT], methods=methods(), max_new_tokens=80):
        assert len(score.token_ids) == 80
        assert_is_the_reference(score)


@pytest.mark.parametrize("host", HOSTS)
def test_given_answers_and_sequences_alone(host):
    completions = [[3, 40, 6, 6, 9], [8, 2], [2]]
    batch = ap.score(model(host), [PROMPT, SHORT, [7]], completions=completions, methods=methods())
    for score in batch:
        assert_is_the_reference(score)
        (alone,) = ap.score(model(host), score.prompt_ids, completions=score.token_ids, methods=methods())
        assert alone.uncertainty == pytest.approx(score.uncertainty, abs=1e-4, rel=1e-6)


@pytest.mark.parametrize("host", HOSTS)
def test_a_sequence_that_stops_before_the_others(host):
    with torch.no_grad():
        eos = ap.score(model(host, eos_token_id=None), PROMPT, max_new_tokens=4)[0].token_ids[2]
    scores = ap.score(model(host, eos_token_id=eos), [PROMPT, SHORT], methods=methods(), max_new_tokens=8)
    assert [len(score.token_ids) for score in scores] == [3, 8]
    for score in scores:
        assert_is_the_reference(score)


@pytest.mark.parametrize("host", HOSTS)
def test_all_names_in_one_pass_and_each_alone_say_the_same(host):
    names, forwards = method_names(sampled=False), []
    made = model(host)
    watched = getattr(made, "original_model", made).register_forward_pre_hook(lambda *_: forwards.append(1))
    together = ap.score(made, [PROMPT, SHORT], methods=names, max_new_tokens=5)
    watched.remove()
    assert len(forwards) == 6  # one a token, and the row of the last one
    for name in names:
        for alone, score in zip(
            ap.score(model(host), [PROMPT, SHORT], methods=name, max_new_tokens=5), together, strict=True
        ):
            assert alone.token_ids == score.token_ids
            # the row of the last token, where a score reads it, parts the float32 sums elsewhere
            assert alone.uncertainty[name] == pytest.approx(score.uncertainty[name], abs=1e-6), name
            ours, theirs = alone.assessments[name].layers, score.assessments[name].layers
            assert [(trace.layer, trace.head) for trace in ours] == [(trace.layer, trace.head) for trace in theirs]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("n_layers", [1, 2, 5])
def test_any_number_of_layers(host, n_layers):
    changes = {"num_hidden_layers": n_layers}
    (score,) = ap.score(model(host, **changes), PROMPT, methods=NEW, max_new_tokens=5)
    text = reference(score, **changes)
    assert score.uncertainty["AttentionScore"] == pytest.approx(
        dense.attention_score(text, layer=n_layers // 2), abs=1e-4
    )
    uncertainty, layers = dense.sauq(text, signal=dense.geometric_mean_self_attention)
    assert score.uncertainty["LogDetRAUQ"] == pytest.approx(uncertainty, abs=1e-4)
    dense.assert_same_layers(score.assessments["LogDetRAUQ"], layers, 1e-4)


# --- heads -----------------------------------------------------------------------------------------------------


def test_heads_are_those_of_sauq():
    names = ["SAUQ", "LapEigValRAUQ", "LogDetRAUQ", "RAUQ"]
    for score in ap.score(model("bridge"), [PROMPT, SHORT], methods=names, max_new_tokens=9):
        heads = {name: [trace.head for trace in score.assessments[name].layers] for name in names}
        assert heads["LapEigValRAUQ"] == heads["LogDetRAUQ"] == heads["SAUQ"]
        signals = [score.assessments[name].layers[0].signal[1:] for name in names[:3]]
        assert all((signal >= 0).all() and (signal <= 1).all() for signal in signals)
        assert not np.allclose(signals[0], signals[1])


def screened_evidence(block, prefix) -> Evidence:
    """One layer; `block` and `prefix` [head, step] are the participation ratios, signals differ by head."""
    block, prefix = np.atleast_3d(block).reshape(1, *np.shape(block)), np.reshape(prefix, (1, *np.shape(prefix)))
    heads, steps = block.shape[1:]
    logs = np.log(np.broadcast_to(np.linspace(0.1, 0.9, heads)[:, None], (heads, steps)))[None]
    return Evidence(
        log_probability=np.full(steps, -0.5),
        entropy=np.ones(steps),
        traces={
            "participation_ratio_generation": block,
            "participation_ratio_screened": prefix,
            "log_determinant_mean_screened": logs,
            "laplacian_eigenvalue_mean_screened": np.exp(logs),
        },
        layers=(0,),
        heads=tuple(range(heads)),
        n_layers=1,
        vocabulary=9,
    )


@pytest.mark.parametrize(
    "method", [ap.LapEigValRAUQ(), ap.LogDetRAUQ(), ap.SAUQ()], ids=["laplacian", "logdet", "sauq"]
)
def test_ties_and_single_tokens_go_as_in_sauq(method):
    nan = np.nan
    steps = [[nan, 1.0, 0.5], [nan, 1.0, 0.7], [nan, 1.0, 0.7 * (1 + 1e-11)], [nan, 1.0, 0.6]]
    made = screened_evidence(steps, [[0.5] * 3] * 4)
    assert method.assess(made).layers[0].head == 1
    one = screened_evidence([[nan], [nan], [nan]], [[0.2], [0.4], [0.4 * (1 + 1e-8)]])
    assert method.assess(one).layers[0].head == 1
    assert method.assess(one).uncertainty == pytest.approx(1.5)


def test_a_weight_of_zero_carries_nothing_over():
    made = screened_evidence([[np.nan, 1.0, 1.0]], [[0.5] * 3])
    made.traces["log_determinant_mean_screened"][..., 1:] = -np.inf
    assessment = ap.LogDetRAUQ().assess(made)
    np.testing.assert_allclose(assessment.layers[0].signal[1:], 0.0)
    p = np.exp(-0.5)
    assert assessment.uncertainty == pytest.approx(1 - np.log([p, 0.2 * p, 0.2 * p]).mean(), abs=1e-12)


# --- under a generate of one's own, and what can be wrong -------------------------------------------------------


def own_generate(n: int):
    return model("bridge").generate(
        torch.tensor([PROMPT]),
        max_new_tokens=n,
        do_sample=False,
        stop_at_eos=False,
        return_type="tokens",
        verbose=False,
    )


@pytest.mark.parametrize(
    "method", [ap.LapEigValRAUQ(), ap.LogDetRAUQ(), ap.AttentionScore(generation_only=True)], ids=lambda m: m.name
)
def test_a_users_own_generate_under_an_attached_probe(method):
    probe = method.probe()
    with probe.attach(model("bridge")):
        output = own_generate(6)
    (assessment,) = method.score(probe)
    (score,) = ap.score(model("bridge"), PROMPT, completions=output[0, len(PROMPT) :].tolist(), methods=method)
    assert assessment.uncertainty == pytest.approx(score.uncertainty[method.name], abs=1e-5)


def test_the_whole_sequence_needs_the_last_row():
    score = ap.AttentionScore()
    probe = score.probe()
    assert probe.layers == "center"
    with probe.attach(model("bridge")):
        output = own_generate(6)
    with pytest.raises(ValueError, match="AttentionScore reads the row of the last generated token"):
        score.score(probe)
    probe.reset()
    with probe.attach(model("bridge"), prompt_lengths=[len(PROMPT)]):
        model("bridge")(output)
    probe.last_tokens(output[:, -1])
    evidence = Evidence.of(probe.results(), 0, n_tokens=6)
    assert evidence.layers == (1,)
    text = dense.read_text(eager("llama"), PROMPT, output[0, len(PROMPT) :].tolist())
    assert score.assess(evidence).uncertainty == pytest.approx(dense.attention_score(text), abs=1e-4)


def test_layers_that_are_not_there():
    with pytest.raises(ValueError, match=r"layers \[7\] have no attention pattern"):
        ap.score(model("bridge"), PROMPT, methods=ap.AttentionScore(7), max_new_tokens=2)
    with pytest.raises(ValueError, match="counted from 0"):
        ap.AttentionScore(-1)
    with pytest.raises(TypeError, match="whole numbers"):
        ap.AttentionScore("middle")


def test_a_layer_of_fewer_heads_than_another_is_averaged_over_its_own():
    logs = np.full((2, 3, 3), -2.0)
    logs[1, 2] = np.nan
    made = Evidence(
        log_probability=np.zeros(2),
        entropy=np.zeros(2),
        traces={"log_determinant_epsilon1e-12": logs * np.array([1, 2, 4])},
        layers=(0, 1),
        heads=(0, 1, 2),
        n_layers=2,
        vocabulary=9,
    )
    assert ap.AttentionScore().assess(made).uncertainty == pytest.approx(8.0)
    assert ap.AttentionScore(generation_only=True).assess(made).uncertainty == pytest.approx(2.0)
    logs[1] = np.nan
    for score in (ap.AttentionScore(), ap.AttentionScore(generation_only=True)):
        with pytest.raises(ValueError, match=r"never fed|whole"):
            score.assess(
                Evidence(np.zeros(2), np.zeros(2), {"log_determinant_epsilon1e-12": logs}, (0, 1), (0, 1, 2), 2, 9)
            )


@pytest.mark.parametrize("kind", [ap.LapEigValRAUQ, ap.LogDetRAUQ])
@pytest.mark.parametrize("options", [{"alpha": 2.0}, {"screen": "max"}, {"layers": "center"}])
def test_wrong_settings(kind, options):
    with pytest.raises(ValueError, match=r"alpha=2|unknown screen 'max'|layers='center'"):
        kind(**options)
    with pytest.raises(ValueError, match=r"unknown clip 'x'|epsilon=-1"):
        kind(**({"clip": "x"} if kind is ap.LapEigValRAUQ else {"epsilon": -1}))


def test_a_model_whose_rows_have_a_sink():
    bridge = tiny_bridge("gpt_oss")
    (score,) = ap.score(bridge, PROMPT, methods=["LogDetRAUQ", "AttentionScore"], rows="sink", max_new_tokens=5)
    text = dense.read_text(tiny_model("gpt_oss"), score.prompt_ids, score.token_ids)
    assert score.uncertainty["AttentionScore"] == pytest.approx(dense.attention_score(text), abs=1e-4)
    with pytest.raises(ValueError, match="use rows='renormalize'"):
        ap.score(bridge, PROMPT, methods="LapEigValRAUQ", rows="sink", max_new_tokens=5)
    (score,) = ap.score(bridge, PROMPT, methods=["LapEigValRAUQ"], rows="renormalize", max_new_tokens=5)
    text = dense.read_text(tiny_model("gpt_oss"), score.prompt_ids, score.token_ids, renormalize_rows=True)
    assert score.uncertainty["LapEigValRAUQ"] == pytest.approx(
        dense.sauq(text, signal=dense.mean_laplacian_eigenvalue)[0], abs=1e-4
    )
