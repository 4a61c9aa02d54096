"""`score` on tiny random models against the dense float64 reference, and every edge of its input."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import transformers
from tiny import VOCAB, tiny_bridge, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from uncertainty import dense

import attnprobe as ap
from attnprobe.uncertainty import method_names

ARCHITECTURES = ("llama", "gpt2", "mistral", "gemma2", "neox", "qwen2", "gpt_oss")
MEASURES = ("intrinsic", "counting", "positional", "zipf", "unembedding")
PROMPT = [5, 9, 23, 44, 8, 61, 12, 17, 33, 70, 21]
SHORT = [11, 6, 15, 9]
NAMES = ("SAUQ", "SAUQ-generation", "RAUQ", "RAUQ-entropy", "RAUQ-paper", "Perplexity", "MeanTokenEntropy")


@pytest.fixture(autouse=True)
def _no_hook_outlives_a_test():
    """A test that fails with hooks left behind does not take the others with it."""
    yield
    if any(point.fwd_hooks for model in _bridges for point in model.hook_dict.values()):
        _bridges.clear()
        bridge.cache_clear()


_bridges: list = []


@functools.cache
def bridge(name: str, **changes):
    if "eos_token_id" in changes and isinstance(changes["eos_token_id"], tuple):
        changes["eos_token_id"] = list(changes["eos_token_id"])  # a tuple can be cached, a list is meant
    model = tiny_bridge(name, **changes)
    _bridges.append(model)
    return model


@functools.cache
def plain(name: str, **changes):
    return tiny_model(name, **changes)


def policy(name: str) -> str:
    return "renormalize" if name == "gpt_oss" else "error"


def reference(score, name: str = "llama", **changes) -> dense.Text:
    model = plain(name, **changes)
    text = dense.read_text(model, score.prompt_ids, score.token_ids, renormalize_rows=name == "gpt_oss")
    text.leverage = dense.leverage_of(model)
    return text


def greedy(name: str, prompt: list[int], n: int, **changes) -> list[int]:
    """Greedy tokens by full forwards of the plain model; EOS is not looked at."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            ids.append(int(plain(name, **changes)(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def words() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer whose token i is the word `w<i>`; 2 is the special token </s>."""
    vocabulary = {("</s>" if i == 2 else f"w{i}"): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def in_words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def assert_same_scores(one, other, tolerance: float) -> None:
    """Two `Score`s of the same answer."""
    assert one.token_ids == other.token_ids
    for name in other.uncertainty:
        assert one.uncertainty[name] == pytest.approx(other.uncertainty[name], abs=tolerance), name
        ours, theirs = one.assessments[name].layers, other.assessments[name].layers
        assert [(t.layer, t.head) for t in ours] == [(t.layer, t.head) for t in theirs], name
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a.signal[1:], b.signal[1:], atol=tolerance, rtol=0)
            np.testing.assert_allclose(a.confidence, b.confidence, atol=tolerance, rtol=0)
    for column in ("probability", "entropy"):
        np.testing.assert_allclose(one.tokens[column], other.tokens[column], atol=tolerance, rtol=0)


# --- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("prompt", [PROMPT, SHORT], ids=["long", "short"])
def test_every_method_equals_the_dense_reference(architecture, prompt):
    (score,) = ap.score(bridge(architecture), [prompt], methods=NAMES, max_new_tokens=9, rows=policy(architecture))
    text = reference(score, architecture)
    assert score.prompt_ids == prompt
    assert list(score.uncertainty) == list(NAMES)
    expected = {
        "SAUQ": dense.sauq(text),
        "SAUQ-generation": dense.sauq(text, scope="generation"),
        "RAUQ": dense.rauq(text),
        "RAUQ-entropy": dense.rauq(text, entropy=True),
        "RAUQ-paper": dense.rauq(text, indexing="paper"),
    }
    for name, (uncertainty, layers) in expected.items():
        assert score.uncertainty[name] == pytest.approx(uncertainty, abs=1e-4), name
        dense.assert_same_layers(score.assessments[name], layers, 1e-4)
    assert score.uncertainty["Perplexity"] == pytest.approx(dense.perplexity(text), abs=1e-5)
    assert score.uncertainty["MeanTokenEntropy"] == pytest.approx(dense.mean_token_entropy(text), abs=1e-5)
    np.testing.assert_allclose(score.tokens["log_probability"], dense.token_log_probabilities(text), atol=1e-5)
    np.testing.assert_allclose(score.tokens["entropy"], dense.token_entropies(text), atol=1e-5)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("scope", ["prefix", "generation"])
@pytest.mark.parametrize("screen", ["final", "mean"])
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "raw"])
def test_every_sauq_equals_the_dense_reference(measure, scope, screen, renormalize):
    options = {"measure": measure, "scope": scope, "screen": screen, "renormalize": renormalize}
    sauq = ap.SAUQ(layers="all", **options)
    for score in ap.score(bridge("llama"), [PROMPT, SHORT], methods=sauq, max_new_tokens=10):
        uncertainty, layers = dense.sauq(reference(score), layers=range(3), **options)
        assert score.uncertainty[sauq.name] == pytest.approx(uncertainty, abs=1e-4)
        dense.assert_same_layers(score.assessments[sauq.name], layers, 1e-4)


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_under_a_sliding_window(architecture, measure):
    sauq = ap.SAUQ(measure=measure, layers="all")
    (score,) = ap.score(bridge(architecture), PROMPT, methods=sauq, max_new_tokens=9, rows=policy(architecture))
    uncertainty, layers = dense.sauq(reference(score, architecture), measure=measure, layers=range(3))
    assert score.uncertainty[sauq.name] == pytest.approx(uncertainty, abs=1e-4)
    dense.assert_same_layers(score.assessments[sauq.name], layers, 1e-4)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_alpha(alpha):
    methods = [ap.SAUQ(alpha=alpha), ap.RAUQ(alpha=alpha)]
    (score,) = ap.score(bridge("llama"), PROMPT, methods=methods, max_new_tokens=6)
    text = reference(score)
    assert score.uncertainty["SAUQ"] == pytest.approx(dense.sauq(text, alpha=alpha)[0], abs=1e-4)
    assert score.uncertainty["RAUQ"] == pytest.approx(dense.rauq(text, alpha=alpha)[0], abs=1e-4)
    if alpha == 1:  # nothing is carried over
        assert score.uncertainty["SAUQ"] == pytest.approx(1 + dense.perplexity(text), abs=1e-5)


def test_the_score_is_the_largest_of_its_layers_and_fills_the_table():
    (score,) = ap.score(bridge("llama"), PROMPT, methods="SAUQ", max_new_tokens=7)
    assessment = score.assessments["SAUQ"]
    assert [trace.layer for trace in assessment.layers] == [1, 2]
    assert len({trace.uncertainty for trace in assessment.layers}) == 2
    worst = max(assessment.layers, key=lambda trace: trace.uncertainty)
    assert assessment.deciding is worst
    assert assessment.uncertainty == worst.uncertainty == score.uncertainty["SAUQ"]
    table = score.tokens
    assert list(table["step"]) == list(range(1, 8))
    assert list(table["token_id"]) == score.token_ids == greedy("llama", PROMPT, 7)
    assert set(table["layer"]) == {worst.layer}
    assert set(table["head"]) == {worst.head}
    np.testing.assert_array_equal(table["signal"], worst.signal)
    np.testing.assert_array_equal(table["confidence"], worst.confidence)
    np.testing.assert_allclose(table["confidence"].iloc[0], table["probability"].iloc[0], rtol=1e-12)
    np.testing.assert_allclose(np.log(table["probability"]), table["log_probability"], atol=1e-12)


def test_one_method_twice_under_two_names():
    one, other = ap.SAUQ(alpha=0.2), ap.SAUQ(alpha=0.7)
    other.name = "SAUQ 0.7"
    (score,) = ap.score(bridge("llama"), PROMPT, methods=[one, other], max_new_tokens=6)
    text = reference(score)
    assert score.uncertainty["SAUQ"] == pytest.approx(dense.sauq(text)[0], abs=1e-4)
    assert score.uncertainty["SAUQ 0.7"] == pytest.approx(dense.sauq(text, alpha=0.7)[0], abs=1e-4)


def test_many_methods_in_one_pass_equal_each_alone():
    methods = [ap.SAUQ(), ap.SAUQ(measure="zipf", layers=[0]), ap.RAUQ(layers="all"), ap.Perplexity()]
    (together,) = ap.score(bridge("llama"), PROMPT, methods=methods, max_new_tokens=6)
    for method in methods:
        (alone,) = ap.score(bridge("llama"), PROMPT, methods=method, max_new_tokens=6)
        name = method.name
        assert alone.uncertainty[name] == pytest.approx(together.uncertainty[name], abs=1e-9)
        layers = [trace.layer for trace in together.assessments[name].layers]
        assert layers == [trace.layer for trace in alone.assessments[name].layers]
    assert [trace.layer for trace in together.assessments["SAUQ-zipf"].layers] == [0]
    assert [trace.layer for trace in together.assessments["RAUQ"].layers] == [0, 1, 2]


# --- batches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_batch_equals_its_sequences_alone(architecture):
    prompts = [PROMPT, SHORT, [7], [*PROMPT, *PROMPT[::-1]]]
    options = {"methods": NAMES, "max_new_tokens": 8, "rows": policy(architecture)}
    batch = ap.score(bridge(architecture), prompts, **options)
    for prompt, together in zip(prompts, batch, strict=True):
        (alone,) = ap.score(bridge(architecture), [prompt], **options)
        assert together.prompt_ids == prompt
        assert_same_scores(together, alone, 1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_batch_size_does_not_change_anything(batch_size):
    prompts = [PROMPT, SHORT, [7], PROMPT[3:], PROMPT[::-1]]
    whole = ap.score(bridge("llama"), prompts, methods=NAMES, max_new_tokens=6)
    parts = ap.score(bridge("llama"), prompts, methods=NAMES, max_new_tokens=6, batch_size=batch_size)
    assert [part.prompt_ids for part in parts] == prompts
    for one, other in zip(parts, whole, strict=True):
        assert_same_scores(one, other, 1e-4)


@pytest.mark.parametrize("stops_after", [1, 3])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral"])
def test_rows_after_the_end_of_a_finished_sequence_do_not_count(architecture, stops_after):
    eos = greedy(architecture, PROMPT, 8)[stops_after - 1]
    other = greedy(architecture, SHORT, 8)
    assert eos not in other, "choose prompts of which one stops early"
    model = bridge(architecture, eos_token_id=eos)
    stopped, running = ap.score(model, [PROMPT, SHORT], methods=NAMES, max_new_tokens=8)
    assert (len(stopped.token_ids), stopped.finish) == (stops_after, "eos")
    assert (running.token_ids, running.finish) == (other, "length")
    assert stopped.token_ids[-1] == eos
    assert len(stopped.tokens) == stops_after
    for score in (stopped, running):
        text = reference(score, architecture)
        for name, (uncertainty, layers) in {
            "SAUQ": dense.sauq(text),
            "SAUQ-generation": dense.sauq(text, scope="generation"),
            "RAUQ": dense.rauq(text),
            "RAUQ-paper": dense.rauq(text, indexing="paper"),
        }.items():
            assert score.uncertainty[name] == pytest.approx(uncertainty, abs=1e-4), name
            dense.assert_same_layers(score.assessments[name], layers, 1e-4)
        assert score.uncertainty["Perplexity"] == pytest.approx(dense.perplexity(text), abs=1e-5)
        assert score.uncertainty["MeanTokenEntropy"] == pytest.approx(dense.mean_token_entropy(text), abs=1e-5)
    (alone,) = ap.score(model, [PROMPT], methods=NAMES, max_new_tokens=8)
    assert_same_scores(stopped, alone, 1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_a_long_answer_equals_the_dense_reference(architecture):
    """Longer than every buffer on the way: waiting decode rows, rows of one pass, Gram blocks."""
    sauqs = [ap.SAUQ(), ap.SAUQ(scope="generation"), ap.SAUQ(measure="zipf"), ap.SAUQ(screen="mean")]
    methods = [*sauqs, ap.RAUQ(indexing="paper")]
    scores = ap.score(bridge(architecture, eos_token_id=None), [PROMPT, SHORT], methods=methods, max_new_tokens=90)
    for score in scores:
        assert len(score.token_ids) == 90
        text = reference(score, architecture)
        for sauq in sauqs:
            uncertainty, layers = dense.sauq(text, measure=sauq.measure, scope=sauq.scope, screen=sauq.screen)
            assert score.uncertainty[sauq.name] == pytest.approx(uncertainty, abs=1e-4), sauq.name
            dense.assert_same_layers(score.assessments[sauq.name], layers, 1e-4)
        uncertainty, layers = dense.rauq(text, indexing="paper")
        assert score.uncertainty["RAUQ-paper"] == pytest.approx(uncertainty, abs=1e-4)
        dense.assert_same_layers(score.assessments["RAUQ-paper"], layers, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_and_a_batch_equals_its_sequences_alone(dtype):
    model = ap.load_model(tiny_model("llama"), dtype=dtype)
    completions = [greedy("llama", PROMPT, 8), greedy("llama", SHORT, 8)]
    batch = ap.score(model, [PROMPT, SHORT], completions=completions, methods=NAMES)
    for prompt, completion, together in zip((PROMPT, SHORT), completions, batch, strict=True):
        (exact,) = ap.score(bridge("llama"), [prompt], completions=[completion], methods=NAMES)
        (alone,) = ap.score(model, [prompt], completions=[completion], methods=NAMES)
        for name in NAMES:
            assert together.uncertainty[name] == pytest.approx(alone.uncertainty[name], abs=0.05), name
            assert alone.uncertainty[name] == pytest.approx(exact.uncertainty[name], abs=0.05), name


# --- forced scoring and a user's own generate -------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forced_scoring_equals_generation(architecture):
    options = {"methods": NAMES, "rows": policy(architecture)}
    prompts = [PROMPT, SHORT]
    generated = ap.score(bridge(architecture), prompts, max_new_tokens=9, **options)
    forced = ap.score(bridge(architecture), prompts, completions=[s.token_ids for s in generated], **options)
    for one, other in zip(forced, generated, strict=True):
        assert one.finish == "given"
        assert_same_scores(one, other, 1e-5)


def test_one_prompt_and_one_completion_need_no_outer_list():
    (flat,) = ap.score(bridge("llama"), PROMPT, completions=[3, 40, 6])
    (nested,) = ap.score(bridge("llama"), [PROMPT], completions=[[3, 40, 6]])
    assert (flat.prompt_ids, flat.token_ids) == (PROMPT, [3, 40, 6])
    assert_same_scores(flat, nested, 1e-9)


def test_forced_scoring_of_ragged_completions_equals_each_alone_and_the_reference():
    prompts, completions = [PROMPT, SHORT, [7]], [[3], [8, 2, 40, 5, 6, 77], [2, 2, 9]]
    scores = ap.score(bridge("llama"), prompts, completions=completions, methods=NAMES)
    for prompt, completion, score in zip(prompts, completions, scores, strict=True):
        assert score.token_ids == completion
        (alone,) = ap.score(bridge("llama"), [prompt], completions=[completion], methods=NAMES)
        assert_same_scores(score, alone, 1e-5)
        uncertainty, layers = dense.sauq(reference(score))
        assert score.uncertainty["SAUQ"] == pytest.approx(uncertainty, abs=1e-4)
        dense.assert_same_layers(score.assessments["SAUQ"], layers, 1e-4)


def own_generate(model, prompt, n: int, **options):
    options = {"do_sample": False, "verbose": False, "return_type": "tokens", "stop_at_eos": False} | options
    return model.generate(torch.tensor(prompt), max_new_tokens=n, **options)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "neox"])
@pytest.mark.parametrize(
    "make",
    [ap.SAUQ, lambda: ap.SAUQ(scope="generation"), lambda: ap.SAUQ(measure="unembedding"), ap.RAUQ],
    ids=["SAUQ", "SAUQ-generation", "SAUQ-unembedding", "RAUQ"],
)
def test_a_users_own_generate_under_an_attached_probe(architecture, make):
    model, method = bridge(architecture), make()
    probe = method.probe()
    with probe.attach(model):
        output = own_generate(model, [PROMPT], 8)
    (assessment,) = method.score(probe)
    (score,) = ap.score(model, [PROMPT], completions=[output[0, len(PROMPT) :].tolist()], methods=make())
    assert assessment.uncertainty == pytest.approx(score.uncertainty[method.name], abs=1e-5)
    theirs = score.assessments[method.name].layers
    assert [(t.layer, t.head) for t in assessment.layers] == [(t.layer, t.head) for t in theirs]


def test_a_users_own_generate_in_a_batch_where_one_stops_early():
    eos = greedy("llama", PROMPT, 8)[2]
    model = bridge("llama", eos_token_id=eos)
    prompts = [PROMPT, [*SHORT, *SHORT, 3, 4, 5]]
    assert len(prompts[0]) == len(prompts[1])
    assert eos not in greedy("llama", prompts[1], 8)
    sauq = ap.SAUQ()
    probe = sauq.probe()
    with probe.attach(model):
        own_generate(model, prompts, 8, stop_at_eos=True, eos_token_id=eos)
    scores = ap.score(model, prompts, max_new_tokens=8)
    assert [len(score.token_ids) for score in scores] == [3, 8]
    for assessment, score in zip(sauq.score(probe), scores, strict=True):
        assert assessment.uncertainty == pytest.approx(score.uncertainty["SAUQ"], abs=1e-5)
        assert len(assessment.layers[0].signal) == len(score.token_ids)


@pytest.mark.parametrize(
    "options", [{"use_past_kv_cache": False}, {"output_logits": True}], ids=["no cache", "output_logits"]
)
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_users_generate_in_another_way(architecture, options):
    model, methods = bridge(architecture), [ap.SAUQ(), ap.SAUQ(scope="generation"), ap.RAUQ()]
    probe = ap.Probe([*methods[0].analyzers(), *methods[2].analyzers()], layers="middle", logits=True)
    with probe.attach(model):
        own_generate(model, [PROMPT], 8, **options)
    (score,) = ap.score(model, [PROMPT], completions=[greedy(architecture, PROMPT, 8)], methods=methods)
    for method in methods:
        (assessment,) = method.score(probe)
        assert assessment.uncertainty == pytest.approx(score.uncertainty[method.name], abs=1e-5), method.name


def test_a_users_probe_beside_score_sees_the_same_and_disturbs_nothing():
    model, sauq = bridge("llama"), ap.SAUQ()
    probe = sauq.probe()
    with probe.attach(model):
        scores = ap.score(model, [PROMPT, SHORT], max_new_tokens=6)
    for score, bare in zip(scores, ap.score(model, [PROMPT, SHORT], max_new_tokens=6), strict=True):
        assert_same_scores(score, bare, 1e-9)
    assessments = sauq.score(probe, tokens=torch.tensor([score.token_ids for score in scores]))
    assert [a.uncertainty for a in assessments] == pytest.approx([s.uncertainty["SAUQ"] for s in scores], abs=1e-6)


def test_a_users_probe_beside_score_sees_no_row_after_the_end():
    eos = greedy("llama", PROMPT, 8)[2]
    model, tdo = bridge("llama", eos_token_id=eos), ap.IntrinsicTDO()
    probe = ap.Probe([tdo], layers=[1])
    with probe.attach(model):
        scores = ap.score(model, [PROMPT, SHORT], max_new_tokens=8)
    assert [len(score.token_ids) for score in scores] == [3, 8]
    results = probe.results()
    # the last token is chosen and never fed back
    assert results["length"].values.tolist() == [len(PROMPT) + 2, len(SHORT) + 7]
    for i, score in enumerate(scores):
        text = reference(score)
        expected = [
            dense.participation_ratio(dense.prefix_block(text, 1, head, text.n_tokens), "intrinsic", None, None)
            for head in range(4)
        ]
        found = results["participation_ratio"].sel(layer=1).values[i]
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_several_calls_under_one_probe_are_several_sequences():
    model, sauq = bridge("llama"), ap.SAUQ()
    probe = sauq.probe()
    with probe.attach(model):
        for prompt, n in ((PROMPT, 8), (SHORT, 3), ([7], 1)):
            own_generate(model, [prompt], n)
    assessments = sauq.score(probe)
    assert [len(assessment.layers[0].signal) for assessment in assessments] == [8, 3, 1]
    for assessment, (prompt, n) in zip(assessments, ((PROMPT, 8), (SHORT, 3), ([7], 1)), strict=True):
        (score,) = ap.score(model, [prompt], completions=[greedy("llama", prompt, n)])
        assert assessment.uncertainty == pytest.approx(score.uncertainty["SAUQ"], abs=1e-5)


def test_a_probe_on_some_heads_chooses_among_them_and_names_them_rightly():
    sauq = ap.SAUQ(layers="all")
    probe = sauq.probe(heads=[1, 3])
    with probe.attach(bridge("llama")):
        output = own_generate(bridge("llama"), [PROMPT], 8)
    (assessment,) = sauq.score(probe)
    text = dense.read_text(plain("llama"), PROMPT, output[0, len(PROMPT) :].tolist())
    text.attention = text.attention[:, [1, 3]]
    uncertainty, layers = dense.sauq(text, layers=range(3))
    assert assessment.uncertainty == pytest.approx(uncertainty, abs=1e-4)
    assert [trace.head for trace in assessment.layers] == [(1, 3)[layer.head] for layer in layers]


def test_a_last_token_that_the_probe_could_not_see_is_asked_for():
    """Decoding by hand: the last token is never fed back, so it has to be named."""
    model, sauq, n = bridge("llama"), ap.SAUQ(), 5
    answer = greedy("llama", PROMPT, n)
    probe = sauq.probe()
    with torch.no_grad(), probe.attach(model, prompt_lengths=len(PROMPT)):
        model(torch.tensor([[*PROMPT, *answer[:-1]]]))
    with pytest.raises(ValueError, match="tokens="):
        sauq.score(probe)
    (assessment,) = sauq.score(probe, tokens=torch.tensor([answer]))
    (score,) = ap.score(model, [PROMPT], completions=[answer])
    assert assessment.uncertainty == pytest.approx(score.uncertainty["SAUQ"], abs=1e-5)


def test_a_probe_without_what_the_score_reads_is_named():
    model = bridge("llama")
    for probe, said in (
        (ap.Probe(ap.SAUQ().analyzers(), layers="middle"), "logits=True"),
        (ap.Probe(ap.RAUQ().analyzers(), layers="middle", logits=True), "trace"),
        (ap.Probe(ap.SAUQ().analyzers(), layers=[0], logits=True), "layer"),
        (ap.Probe(ap.SAUQ().analyzers(), layers=[0, 1], logits=True), r"layer.*\[2\]"),
    ):
        with probe.attach(model):
            own_generate(model, [PROMPT], 4)
        with pytest.raises(ValueError, match=said) as caught:
            ap.SAUQ().score(probe)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="Perplexity"):
        ap.Perplexity().probe()


# --- edges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_models_of_one_and_two_layers(architecture, n_layers, n):
    changes = {"num_hidden_layers" if architecture == "llama" else "n_layer": n_layers}
    (score,) = ap.score(bridge(architecture, **changes), [PROMPT], methods=NAMES, max_new_tokens=n)
    text = reference(score, architecture, **changes)
    assert text.attention.shape[0] == n_layers
    for name, (uncertainty, layers) in {
        "SAUQ": dense.sauq(text),
        "SAUQ-generation": dense.sauq(text, scope="generation"),
        "RAUQ": dense.rauq(text),
        "RAUQ-paper": dense.rauq(text, indexing="paper"),
    }.items():
        assert [layer.layer for layer in layers] == list(range(n_layers))
        assert score.uncertainty[name] == pytest.approx(uncertainty, abs=1e-4), name
        dense.assert_same_layers(score.assessments[name], layers, 1e-4)


@pytest.mark.parametrize("prompt", [PROMPT, SHORT, [7]], ids=["long", "short", "one token"])
@pytest.mark.parametrize("how", ["max_new_tokens", "completions"])
def test_a_single_token(prompt, how):
    options = {"max_new_tokens": 1} if how == "max_new_tokens" else {"completions": [greedy("llama", prompt, 1)]}
    (score,) = ap.score(bridge("llama"), [prompt], methods=NAMES, **options)
    text = reference(score)
    assert len(score.token_ids) == 1
    log_p = dense.token_log_probabilities(text)[0]
    for name in ("SAUQ", "SAUQ-generation", "RAUQ", "RAUQ-paper"):
        assert score.uncertainty[name] == pytest.approx(1 - log_p, abs=1e-5)
    assert score.uncertainty["Perplexity"] == pytest.approx(-log_p, abs=1e-5)
    # the head is chosen by the participation ratio of the prompt's pattern
    heads = [layer.head for layer in dense.sauq(text)[1]]
    assert [trace.head for trace in score.assessments["SAUQ"].layers] == heads
    assert [trace.head for trace in score.assessments["RAUQ"].layers] == [0, 0]


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "raw"])
@pytest.mark.parametrize("screen", ["final", "mean"])
def test_two_tokens_tie_every_head_and_the_lowest_is_taken(measure, renormalize, screen):
    """A 1x1 generation block has participation ratio 1, whatever the measure."""
    sauq = ap.SAUQ(measure=measure, renormalize=renormalize, screen=screen, layers="all")
    for score in ap.score(bridge("gpt2"), [PROMPT, SHORT, [7]], methods=sauq, max_new_tokens=2):
        assert len(score.token_ids) == 2
        assert [trace.head for trace in score.assessments[sauq.name].layers] == [0, 0, 0]


def test_an_immediate_end_of_text():
    eos = greedy("llama", PROMPT, 1)[0]
    (score,) = ap.score(bridge("llama", eos_token_id=eos), [PROMPT], methods=NAMES, max_new_tokens=9)
    assert (score.token_ids, score.finish) == ([eos], "eos")
    text = reference(score)
    assert score.uncertainty["SAUQ"] == pytest.approx(1 + dense.perplexity(text), abs=1e-5)
    assert np.isfinite(list(score.uncertainty.values())).all()


def test_beyond_the_learned_positions_is_one_sentence():
    model = bridge("gpt2", eos_token_id=None)
    assert model.original_model.config.n_positions == 128
    assert len(ap.score(model, [PROMPT], max_new_tokens=128 - len(PROMPT))[0].token_ids) == 128 - len(PROMPT)
    for prompt, n in ((PROMPT, 130), ([*PROMPT] * 12, 2)):
        with pytest.raises(ValueError, match="128") as caught:
            ap.score(model, [prompt], max_new_tokens=n)
        sentence(caught)


def test_several_end_tokens():
    tokens = greedy("llama", PROMPT, 6)
    (score,) = ap.score(bridge("llama", eos_token_id=(96, tokens[3])), [PROMPT], max_new_tokens=9)
    assert (score.token_ids, score.finish) == (tokens[:4], "eos")


@pytest.mark.parametrize("method", ["SAUQ", "SAUQ-generation", "RAUQ", "Perplexity", "MeanTokenEntropy"])
def test_a_very_improbable_completion_is_a_finite_number(method):
    """Attention is all but hard here: some heads give the generated tokens a weight of exactly 0."""
    model = bridge("gpt2", initializer_range=4.0)
    (score,) = ap.score(model, [PROMPT], completions=[[50, 3, 77, 12]], methods=method)
    assert score.tokens["log_probability"].min() < -50
    assert np.isfinite(score.uncertainty[method])


def test_the_spectrum_of_all_but_hard_attention():
    model = bridge("gpt2", initializer_range=4.0)
    (score,) = ap.score(model, [PROMPT], completions=[[50, 3, 77, 12]], methods=ap.SAUQ(layers=[1]))
    text = reference(score, "gpt2", initializer_range=4.0)
    (trace,) = score.assessments["SAUQ"].layers
    expected = [
        dense.participation_ratio(dense.prefix_block(text, 1, trace.head, t), "intrinsic", None, None)
        for t in range(1, 5)
    ]
    np.testing.assert_allclose(trace.signal, expected, atol=1e-4)
    assert trace.uncertainty > 10


def sentence(caught) -> str:
    """The message of an error, which has to be one clear sentence."""
    message = str(caught.value)
    assert "\n" not in message.strip()
    assert len(message.split()) >= 4
    return message


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([[]], {}, "prompt 0 is empty"),
        ([PROMPT, []], {}, "prompt 1 is empty"),
        ([], {}, "prompts is empty"),
        ([PROMPT], {"completions": [[]]}, "completion 0 is empty"),
        ([PROMPT, SHORT], {"completions": [[3], []]}, "completion 1 is empty"),
        ([PROMPT, SHORT], {"completions": [[3]]}, "1 completions for 2 prompts"),
        ([PROMPT], {"completions": [[3], [4]]}, "2 completions for 1 prompts"),
        ([PROMPT], {"methods": ()}, "methods is empty"),
        ([PROMPT], {"methods": "SAUQS"}, "did you mean 'SAUQ'"),
        ([PROMPT], {"methods": ("RAUQ", "perplexity")}, "did you mean 'Perplexity'"),
        ([PROMPT], {"methods": "Nonsense"}, "SAUQ-generation.*MeanTokenEntropy"),
        ([PROMPT], {"methods": ("SAUQ", ap.SAUQ(alpha=0.5))}, "SAUQ twice"),
        ([PROMPT], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([PROMPT], {"max_new_tokens": -3}, "max_new_tokens=-3"),
        ([PROMPT], {"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ([PROMPT], {"batch_size": 0}, "batch_size=0"),
        ([PROMPT], {"rows": "ignore"}, "rows='ignore'"),
        ([PROMPT], {"stop": "w5"}, "no tokenizer"),
        ([PROMPT], {"chat": True}, "token ids"),
        ("text", {}, "no tokenizer"),
        ([PROMPT], {"completions": ["text"]}, "no tokenizer"),
        ([PROMPT], {"methods": ap.SAUQ(layers=[7])}, r"\[7\]"),
        ([PROMPT], {"do_sample": True, "temperature": 0.0}, "temperature"),
        ([PROMPT], {"do_sample": True, "temperature": -1.0}, "temperature"),
        ([PROMPT], {"do_sample": True, "top_k": 0}, "top_k"),
        ([PROMPT], {"do_sample": True, "top_p": 1.5}, "top_p"),
    ],
)
def test_wrong_input_is_one_sentence(prompts, options, said):
    with pytest.raises(ValueError, match=said) as caught:
        ap.score(bridge("llama"), prompts, **({"max_new_tokens": 2} | options))
    sentence(caught)


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        (5, {}, "prompts"),
        (None, {}, "prompts"),
        ([PROMPT, 5], {}, "prompts"),
        ([{"role": "user"}], {}, "prompts"),
        ([[1.5, 2.0]], {}, "prompt"),
        ([["w1", "w2"]], {}, "prompt"),
        ([PROMPT], {"completions": 5}, "completions"),
        ([PROMPT], {"completions": [[1.5]]}, "completion"),
        ([PROMPT], {"methods": 5}, "method"),
        ([PROMPT], {"methods": [5]}, "method"),
        ([PROMPT], {"methods": ap.SAUQ}, "method"),
        ([PROMPT], {"methods": [ap.SAUQ]}, "method"),
    ],
)
def test_wrong_types_are_one_sentence(prompts, options, said):
    with pytest.raises((TypeError, ValueError), match=said) as caught:
        ap.score(bridge("llama"), prompts, **options)
    sentence(caught)


@pytest.mark.parametrize("options", [{}, {"completions": [[3, VOCAB]]}])
def test_token_ids_outside_the_vocabulary_are_one_sentence(options):
    prompt = PROMPT if options else [3, VOCAB + 5]
    with pytest.raises(ValueError, match="vocabulary") as caught:
        ap.score(bridge("llama"), [prompt], **options)
    sentence(caught)


@pytest.mark.parametrize("model", [5, None, torch.nn.Linear(2, 2)])
def test_something_that_is_no_model(model):
    with pytest.raises(TypeError, match=r"TransformerBridge|HookedTransformer|transformers"):
        ap.score(model, [PROMPT])


@pytest.mark.parametrize("options", [{"alpha": -0.1}, {"alpha": 1.5}, {"alpha": float("nan")}])
def test_wrong_settings_of_the_recurrence(options):
    for kind in (ap.SAUQ, ap.RAUQ):
        with pytest.raises(ValueError, match="alpha"):
            kind(**options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ap.SAUQ, {"measure": "euclid"}),
        (ap.SAUQ, {"scope": "prompt"}),
        (ap.SAUQ, {"screen": "max"}),
        (ap.SAUQ, {"layers": "middel"}),
        (ap.RAUQ, {"indexing": "papers"}),
    ],
)
def test_wrong_options_name_themselves_and_what_there_is(kind, options):
    (given,) = options.values()
    with pytest.raises(ValueError, match=given):
        kind(**options)


def test_the_method_names_are_those_that_outside_code_uses():
    fixed = {"SAUQ", "SAUQ-generation", "RAUQ", "Perplexity", "MeanTokenEntropy", "SemanticEntropy", "LUQ"}
    assert fixed <= set(method_names())
    names = method_names(sampled=False)
    (score,) = ap.score(bridge("llama"), [PROMPT], methods=names, max_new_tokens=3)
    assert list(score.uncertainty) == names


def test_the_model_is_left_as_it_was_also_after_an_error():
    model = bridge("gpt_oss")
    attributes = set(vars(model))
    ap.score(model, [PROMPT], max_new_tokens=3, rows="renormalize")
    with pytest.raises(ValueError, match="does not sum to 1"):
        ap.score(model, [PROMPT], max_new_tokens=3)
    assert all(not point.fwd_hooks for point in model.hook_dict.values())
    assert not model.original_model._forward_pre_hooks
    assert set(vars(model)) == attributes


@pytest.mark.parametrize("container", [list, tuple, torch.tensor, np.array], ids=["list", "tuple", "torch", "numpy"])
def test_token_ids_in_any_container(container):
    expected = greedy("llama", PROMPT, 3)
    for prompts in (container(PROMPT), container([PROMPT]), [container(PROMPT)]):
        (score,) = ap.score(bridge("llama"), prompts, max_new_tokens=3)
        assert (score.prompt_ids, score.token_ids) == (PROMPT, expected)
        assert (score.prompt, score.text) == ("", "")


# --- text ------------------------------------------------------------------------------------------------


def test_strings_in_and_out():
    (by_text,) = ap.score(bridge("llama"), in_words(PROMPT), tokenizer=words(), methods=NAMES, max_new_tokens=5)
    (by_ids,) = ap.score(bridge("llama"), [PROMPT], methods=NAMES, max_new_tokens=5)
    assert by_text.prompt_ids == PROMPT
    assert by_text.prompt == in_words(PROMPT)
    assert by_text.text == in_words(by_ids.token_ids)
    assert list(by_text.tokens["token"]) == in_words(by_ids.token_ids).split()
    assert_same_scores(by_text, by_ids, 1e-9)


def test_completions_as_strings():
    answer = greedy("llama", PROMPT, 5)
    (score,) = ap.score(bridge("llama"), in_words(PROMPT), completions=in_words(answer), tokenizer=words())
    assert (score.token_ids, score.text, score.finish) == (answer, in_words(answer), "given")
    (by_ids,) = ap.score(bridge("llama"), [PROMPT], completions=[answer])
    assert_same_scores(score, by_ids, 1e-9)
    with pytest.raises(ValueError, match="completion 0 is empty"):
        ap.score(bridge("llama"), in_words(PROMPT), completions="", tokenizer=words())
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        ap.score(bridge("llama"), "", tokenizer=words())


@pytest.mark.parametrize(("mark_from", "mark_to"), [(0, 1), (2, 3), (2, 4), (5, 6)])
def test_a_stop_string_ends_the_answer_and_is_cut_from_the_text(mark_from, mark_to):
    """Also one that two tokens complete together; the tokens that complete it are scored."""
    tokens = greedy("llama", PROMPT, 6)
    assert len(set(tokens)) == 6
    stop = in_words(tokens[mark_from:mark_to])
    (score,) = ap.score(bridge("llama"), [PROMPT], tokenizer=words(), stop=stop, methods=NAMES, max_new_tokens=9)
    assert (score.token_ids, score.finish) == (tokens[:mark_to], "stop")
    assert score.text.strip() == in_words(tokens[:mark_from])
    (forced,) = ap.score(bridge("llama"), [PROMPT], completions=[tokens[:mark_to]], methods=NAMES)
    assert_same_scores(score, forced, 1e-5)


def test_the_first_of_several_stop_strings_counts_and_others_go_on():
    tokens, other = greedy("llama", PROMPT, 6), greedy("llama", SHORT, 6)
    stop = [f"w{tokens[4]}", f"w{tokens[1]} w{tokens[2]}"]
    assert tokens[4] not in other
    stopped, running = ap.score(
        bridge("llama"), [PROMPT, SHORT], tokenizer=words(), stop=stop, methods=NAMES, max_new_tokens=6
    )
    assert (stopped.token_ids, stopped.text.strip(), stopped.finish) == (
        tokens[:3],
        in_words(tokens[:1]),
        "stop",
    )
    assert (running.token_ids, running.finish) == (other, "length")
    for score in (stopped, running):
        uncertainty, layers = dense.sauq(reference(score))
        assert score.uncertainty["SAUQ"] == pytest.approx(uncertainty, abs=1e-4)
        dense.assert_same_layers(score.assessments["SAUQ"], layers, 1e-4)
    with pytest.raises(ValueError, match="empty stop string"):
        ap.score(bridge("llama"), [PROMPT], tokenizer=words(), stop=["w1", ""])


def test_chat_needs_a_template_and_uses_it():
    tokenizer = words()
    with pytest.raises(ValueError, match="chat template"):
        ap.score(bridge("llama"), in_words(SHORT), tokenizer=tokenizer, chat=True)
    tokenizer.chat_template = (
        "{% for m in messages %}w3 {{ m['content'] }} w4 {% endfor %}{% if add_generation_prompt %}w1{% endif %}"
    )
    (score,) = ap.score(bridge("llama"), in_words(SHORT), tokenizer=tokenizer, chat=True, max_new_tokens=3)
    assert score.prompt_ids == [3, *SHORT, 4, 1]
    assert score.token_ids == greedy("llama", score.prompt_ids, 3)


# --- sampling --------------------------------------------------------------------------------------------


def test_greedy_whatever_the_checkpoint_says():
    model = tiny_bridge("llama")
    settings = model.original_model.generation_config
    settings.do_sample, settings.temperature, settings.min_new_tokens, settings.num_beams = True, 5.0, 9, 3
    (score,) = ap.score(model, [PROMPT], max_new_tokens=8)
    assert score.token_ids == greedy("llama", PROMPT, 8)


def test_sampling_is_reproducible_and_its_probabilities_are_the_models_own():
    options = {"do_sample": True, "temperature": 3.0, "top_k": 30, "top_p": 0.95, "max_new_tokens": 8}
    runs = [ap.score(bridge("llama"), [PROMPT, SHORT], seed=s, methods=NAMES, **options) for s in (1, 1, 2)]
    tokens = [[score.token_ids for score in run] for run in runs]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]
    assert tokens[0][0] != greedy("llama", PROMPT, 8)
    for one, again in zip(runs[0], runs[1], strict=True):
        assert_same_scores(one, again, 1e-9)
    for score in runs[0]:
        text = reference(score)
        np.testing.assert_allclose(score.tokens["log_probability"], dense.token_log_probabilities(text), atol=1e-5)
        np.testing.assert_allclose(score.tokens["entropy"], dense.token_entropies(text), atol=1e-5)
        uncertainty, layers = dense.sauq(text)
        assert score.uncertainty["SAUQ"] == pytest.approx(uncertainty, abs=1e-4)
        dense.assert_same_layers(score.assessments["SAUQ"], layers, 1e-4)


def test_sampling_without_a_seed_follows_the_global_state():
    def answers():
        return [
            score.token_ids
            for score in ap.score(bridge("llama"), [PROMPT], do_sample=True, temperature=3.0, max_new_tokens=8)
        ]

    torch.manual_seed(3)
    first = answers()
    second = answers()
    torch.manual_seed(3)
    assert answers() == first
    assert second != first


def test_top_k_of_one_is_greedy():
    (score,) = ap.score(bridge("llama"), [PROMPT], do_sample=True, top_k=1, max_new_tokens=6)
    assert score.token_ids == greedy("llama", PROMPT, 6)


def test_samples_of_one_prompt_differ_from_batch_to_batch():
    """A seed is for the whole call: the second batch does not draw the numbers of the first again."""
    scores = ap.score(
        bridge("llama"), [PROMPT] * 4, do_sample=True, temperature=3.0, seed=0, batch_size=2, max_new_tokens=8
    )
    assert len({tuple(score.token_ids) for score in scores}) == 4
