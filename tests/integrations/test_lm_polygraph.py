"""Scores of this library inside LM-Polygraph: the numbers, padded batches, ends of answers, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("lm_polygraph", reason='needs LM-Polygraph: pip install "attnprobe[lm-polygraph]"')

from integrations.polygraph_models import END, MAX_NEW_TOKENS, OTHER_END, PAD, PROMPTS, whitebox, words
from lm_polygraph import estimators as theirs
from lm_polygraph.defaults.register_default_stat_calculators import register_default_stat_calculators
from lm_polygraph.utils.builder_enviroment_stat_calculator import BuilderEnvironmentStatCalculator
from lm_polygraph.utils.dataset import Dataset
from lm_polygraph.utils.estimate_uncertainty import estimate_uncertainty as their_estimate_uncertainty
from lm_polygraph.utils.manager import UEManager
from omegaconf import OmegaConf

import attnprobe as ap
from attnprobe.integrations import lm_polygraph as bridge
from attnprobe.integrations.lm_polygraph.answers import answer_alone
from attnprobe.uncertainty import method_names

METHODS = method_names(sampled=False)


def managed(model, estimators, *, calculators=None, prompts=PROMPTS) -> UEManager:
    """A manager that has run, errors and all."""
    manager = UEManager(
        Dataset(prompts, ["w1"] * len(prompts), batch_size=len(prompts)),
        model,
        estimators,
        available_stat_calculators=bridge.stat_calculators() if calculators is None else calculators,
        builder_env_stat_calc=BuilderEnvironmentStatCalculator(model),
        generation_metrics=[],
        ue_metrics=[],
        processors=[],
        ignore_exceptions=False,
        verbose=False,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    manager()
    return manager


def numbers(manager: UEManager, name: str) -> list[float]:
    return manager.estimations["sequence", name]


def scored_alone(model, answers, methods) -> list[dict[str, float]]:
    """`ap.score` of each prompt by itself."""
    ids = [words()(prompt)["input_ids"] for prompt in PROMPTS]
    return [
        ap.score(model.model, [prompt], completions=[answer], methods=methods)[0].uncertainty
        for prompt, answer in zip(ids, answers, strict=True)
    ]


# --- the numbers ------------------------------------------------------------------------------------------


def test_a_padded_batch_gives_every_answer_its_own_score():
    model = whitebox()
    manager = managed(model, bridge.estimators(METHODS), calculators=bridge.stat_calculators(METHODS))
    expected = scored_alone(model, manager.stats["greedy_tokens"], METHODS)
    for name in METHODS:
        found = numbers(manager, f"AttnProbe_{name}")
        np.testing.assert_allclose(found, [one[name] for one in expected], atol=1e-6, rtol=1e-6, err_msg=name)
        assert len(set(found)) == len(PROMPTS), name
    assert model.model.config._attn_implementation == "sdpa"


def test_estimators_that_share_make_one_forward_a_batch_and_others_one_each():
    def forwards(estimators, calculators) -> int:
        model, calls = whitebox(), []
        model.model.register_forward_hook(lambda *_: calls.append(1))
        managed(model, estimators, calculators=calculators)
        return len(calls)

    three = ["SAUQ", "RAUQ-paper", "AttentionScore"]
    assert forwards(bridge.estimators(three), bridge.stat_calculators(three)) == MAX_NEW_TOKENS + 1
    assert forwards([bridge.AttnProbeEstimator(name) for name in three], None) == MAX_NEW_TOKENS + 3


@pytest.mark.parametrize("ours", ["RAUQ", "RAUQ-entropy", "Perplexity", "MaximumSequenceProbability", "AttentionScore"])
def test_one_prompt_has_the_number_of_lm_polygraphs_own_estimator(ours):
    own = {"RAUQ-entropy": lambda: theirs.RAUQ(use_entropy=True)}.get(ours, getattr(theirs, ours.split("-")[0]))
    for prompt in PROMPTS:
        model = whitebox("eager")
        expected = their_estimate_uncertainty(model, own(), prompt)
        found = their_estimate_uncertainty(model, bridge.AttnProbeEstimator(ours), prompt)
        assert found.uncertainty == pytest.approx(expected.uncertainty, abs=1e-5)
        assert found.generation_text == expected.generation_text
        # the same on sdpa, where LM-Polygraph's own function cannot generate
        assert bridge.estimate_uncertainty(whitebox(), bridge.AttnProbeEstimator(ours), prompt).uncertainty == (
            pytest.approx(expected.uncertainty, abs=1e-5)
        )


def test_estimate_uncertainty_takes_estimators_that_share_and_returns_every_token():
    found = bridge.estimate_uncertainty(whitebox(), bridge.AttnProbeEstimator("SAUQ", shared=True), PROMPTS[0])
    assert found.estimator == "AttnProbe_SAUQ"
    assert found.generation_text == words().decode(found.generation_tokens)
    alone = bridge.estimate_uncertainty(whitebox(), bridge.AttnProbeEstimator("SAUQ"), PROMPTS[0])
    assert found.uncertainty == pytest.approx(alone.uncertainty, abs=1e-9)


# --- what LM-Polygraph does otherwise ---------------------------------------------------------------------


def test_lm_polygraphs_rauq_gives_a_batch_the_attention_of_its_first_item():
    model = whitebox("eager")
    batch = managed(
        model,
        [theirs.RAUQ(), bridge.AttnProbeEstimator("RAUQ")],
        calculators=register_default_stat_calculators("Whitebox"),
    )
    alone = [their_estimate_uncertainty(model, theirs.RAUQ(), prompt).uncertainty for prompt in PROMPTS]
    np.testing.assert_allclose(numbers(batch, "AttnProbe_RAUQ"), alone, atol=1e-5)
    apart = np.abs(np.array(numbers(batch, "RAUQ")) - alone)
    assert apart[0] < 1e-5
    assert (apart[1:] > 1e-3).all()


def test_lm_polygraphs_attention_score_counts_padding():
    model = whitebox("eager")
    batch = managed(
        model,
        [theirs.AttentionScore(), bridge.AttnProbeEstimator("AttentionScore")],
        calculators=register_default_stat_calculators("Whitebox"),
    )
    alone = [their_estimate_uncertainty(model, theirs.AttentionScore(), prompt).uncertainty for prompt in PROMPTS]
    np.testing.assert_allclose(numbers(batch, "AttnProbe_AttentionScore"), alone, atol=1e-4)
    apart = np.abs(np.array(numbers(batch, "AttentionScore (layer=3)")) - alone)
    assert apart[0] < 1e-4  # the longest prompt is not padded
    assert (apart[1:] > 1).all()


def test_lm_polygraphs_probabilities_are_those_with_the_end_token_at_the_bottom():
    model = whitebox("eager", ends=[END])
    their = their_estimate_uncertainty(model, theirs.MaximumSequenceProbability(), PROMPTS[0])
    ours = bridge.estimate_uncertainty(model, bridge.AttnProbeEstimator("MaximumSequenceProbability"), PROMPTS[0])
    ids, answer = words()(PROMPTS[0])["input_ids"], ours.generation_tokens
    with torch.no_grad():
        logits = model.model(torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1].double()

    def minus_log_p(logits):
        return -float(logits.log_softmax(-1)[range(len(answer)), answer].sum())

    changed = logits.clone()
    changed[:2, END] = torch.cat([logits[:2, :END], logits[:2, END + 1 :]], 1).amin(1)
    assert ours.uncertainty == pytest.approx(minus_log_p(logits), abs=1e-5)
    assert their.uncertainty == pytest.approx(minus_log_p(changed), abs=1e-5)
    assert ours.uncertainty - their.uncertainty > 1e-3
    assert their.generation_tokens == answer[:-1]  # theirs leaves out a token that ended nothing


def test_lm_polygraphs_own_function_wants_eager_for_any_estimator():
    with pytest.raises(IndexError):
        their_estimate_uncertainty(whitebox("sdpa"), theirs.Perplexity(), PROMPTS[0])


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_few_layers_are_enough(n_layers):
    with pytest.raises(IndexError):
        their_estimate_uncertainty(whitebox("eager", n_layers=n_layers), theirs.RAUQ(), PROMPTS[0])
    found = bridge.estimate_uncertainty(whitebox(n_layers=n_layers), bridge.AttnProbeEstimator("RAUQ"), PROMPTS[0])
    assert found.uncertainty >= 1


def test_estimators_keep_nothing_of_a_model():
    theirs_kept, ours = theirs.RAUQ(), bridge.AttnProbeEstimator("RAUQ")
    their_estimate_uncertainty(whitebox("eager"), theirs_kept, PROMPTS[0])
    bridge.estimate_uncertainty(whitebox(), ours, PROMPTS[0])
    deeper = whitebox("eager", n_layers=12)
    with pytest.raises(ValueError, match="reshape"):
        their_estimate_uncertainty(deeper, theirs_kept, PROMPTS[0])
    expected = their_estimate_uncertainty(deeper, theirs.RAUQ(), PROMPTS[0]).uncertainty
    assert bridge.estimate_uncertainty(deeper, ours, PROMPTS[0]).uncertainty == pytest.approx(expected, abs=1e-5)


# --- where an answer ends ---------------------------------------------------------------------------------


def test_what_a_batch_decodes_behind_an_end_is_no_part_of_an_answer():
    first = managed(whitebox(), []).stats["greedy_tokens"]
    # a token that the second answer has in its middle, and no other answer has
    at = next(n for n in (2, 3) if first[1][n] not in [*first[0], *first[2], *first[1][:n]])
    model = whitebox(ends=[END, first[1][at]])
    manager = managed(model, [bridge.AttnProbeEstimator("SAUQ"), bridge.AttnProbeEstimator("Perplexity")])
    given = manager.stats["greedy_tokens"]
    assert given[1] == [*first[1][: at + 1], *[PAD] * (MAX_NEW_TOKENS - at - 1)]  # what LM-Polygraph leaves in
    alone = scored_alone(model, [given[0], first[1][: at + 1], given[2]], ["SAUQ", "Perplexity"])
    for name in ("SAUQ", "Perplexity"):
        np.testing.assert_allclose(numbers(manager, f"AttnProbe_{name}"), [one[name] for one in alone], atol=1e-6)


@pytest.mark.parametrize("ends", [None, [END]])
def test_what_a_batch_decodes_behind_a_stop_string_is_no_part_of_an_answer(ends):
    first = managed(whitebox(ends=ends), []).stats["greedy_tokens"]
    at = next(n for n in (1, 2, 3) if first[1][n] not in [*first[0], *first[2], *first[1][:n]])
    model = whitebox(stop=[f"w{first[1][at]}"], ends=ends)
    manager = managed(model, [bridge.AttnProbeEstimator("SAUQ")])
    given = manager.stats["greedy_tokens"]
    assert given[1][: at + 1] == first[1][: at + 1]
    assert len(given[1]) == MAX_NEW_TOKENS  # what LM-Polygraph leaves in: padding, or tokens that nobody asked for
    alone = scored_alone(model, [given[0], first[1][: at + 1], given[2]], ["SAUQ"])
    np.testing.assert_allclose(numbers(manager, "AttnProbe_SAUQ"), [one["SAUQ"] for one in alone], atol=1e-6)


def test_an_answer_ends_with_the_token_that_ended_it():
    assert answer_alone([5, OTHER_END, END, PAD], {END, OTHER_END}, None) == [5, OTHER_END]
    assert answer_alone([5, 6, 7], {END}, None) == [5, 6, 7]
    assert answer_alone([5, 6, 7], {END}, lambda tokens: 6 in tokens) == [5, 6]


# --- names, options, refusals -----------------------------------------------------------------------------


def test_estimators_are_called_after_their_settings():
    assert str(bridge.AttnProbeEstimator()) == "AttnProbe_SAUQ"
    assert str(bridge.AttnProbeEstimator("RAUQ", alpha=0.5)) == "AttnProbe_RAUQ(alpha=0.5)"
    assert str(bridge.AttnProbeEstimator("RAUQ", alpha=0.5, name="half")) == "AttnProbe_half"
    assert str(bridge.AttnProbeEstimator(ap.SAUQ(scope="generation"))) == "AttnProbe_SAUQ-generation"
    assert bridge.AttnProbeEstimator().level == "sequence"


def test_options_reach_the_method_by_every_way():
    entry = {"method": "RAUQ", "alpha": 0.5, "layers": [1, 2], "name": "half"}
    built = bridge.load_estimator(OmegaConf.create(entry)).method
    listed = bridge.load_stat_calculator(OmegaConf.create({"methods": ["SAUQ", entry]}), None).methods[1]
    for method in (built, listed, bridge.AttnProbeEstimator(**entry).method):
        assert (method.name, method.alpha, list(method.layers)) == ("half", 0.5, [1, 2])
    specifications = [entry, "SAUQ"]
    manager = managed(
        whitebox(), bridge.estimators(specifications), calculators=bridge.stat_calculators(specifications)
    )
    assert set(manager.estimations) == {("sequence", "AttnProbe_half"), ("sequence", "AttnProbe_SAUQ")}


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: bridge.AttnProbeEstimator("SAUK"), ValueError, "did you mean 'SAUQ'"),
        (lambda: bridge.AttnProbeEstimator("RAUQ", alfa=1), ValueError, "no option 'alfa'"),
        (lambda: bridge.AttnProbeEstimator(ap.RAUQ(), alpha=1), ValueError, "an object has its own"),
        (lambda: bridge.AttnProbeEstimator(ap.RAUQ(), name="mine"), ValueError, "set its own name"),
        (lambda: bridge.AttnProbeEstimator("LUQ"), ValueError, "which LM-Polygraph does itself"),
        (lambda: bridge.AttnProbeEstimator(3), TypeError, "must be names or Method objects"),
        (lambda: bridge.AttnProbeCalculator([{"alpha": 1}]), ValueError, "names no method"),
        (lambda: bridge.AttnProbeCalculator(["SAUQ", "SAUQ"]), ValueError, "twice"),
        (lambda: bridge.AttnProbeCalculator([]), ValueError, "methods is empty"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(make, error, sentence):
    with pytest.raises(error, match=sentence) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_a_method_that_the_calculator_does_not_compute_is_named():
    with pytest.raises(ValueError, match="computes RAUQ and not SAUQ: add it"):
        managed(whitebox(), bridge.estimators(["SAUQ"]), calculators=bridge.stat_calculators(["RAUQ"]))


def test_padding_on_the_right_is_refused():
    with pytest.raises(ValueError, match="padding_side = 'left'"):
        managed(whitebox(padding_side="right"), [bridge.AttnProbeEstimator()])


def test_models_without_decoder_attention_are_refused():
    estimator = bridge.AttnProbeEstimator()
    for model in (object(), whitebox(model_type="vLLMCausalLM")):
        with pytest.raises(TypeError, match="WhiteboxModel of model_type 'CausalLM'"):
            estimator({"model": model, "input_texts": PROMPTS, "greedy_tokens": [[5]] * 3})
