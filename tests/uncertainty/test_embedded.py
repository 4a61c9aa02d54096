"""The embedded model on real text against the dense float64 reference."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from uncertainty import dense

import attnprobe as ap

pytestmark = pytest.mark.model

NEW_TOKENS = 20
METHODS = (
    *("SAUQ", "SAUQ-generation", "RAUQ", "LapEigValRAUQ", "LogDetRAUQ", "AttentionScore"),
    *("Perplexity", "MaximumSequenceProbability", "MeanTokenEntropy", "MaximumTokenEntropy"),
)
MEASURES = ("intrinsic", "counting", "positional", "zipf", "unembedding")

# (goes through the chat template, text)
TEXTS = {
    "lighthouse": (
        False,
        "The lighthouse stood at the end of a long spit of shingle, and on clear evenings its lamp "
        "could be seen from the windows of every cottage in the bay. Old Mr. Harrow had kept it for "
        "one and thirty years, and in all that time it had been dark on a single night only, when the "
        "great storm of the autumn broke the glass and put out the flame. He spoke of that night "
        "seldom, and never without lowering his voice. When his daughter asked him why, he",
    ),
    "gardener": (
        True,
        "A gardener has twelve rose bushes. In the spring he gives three of them to his neighbour, "
        "and in the summer he plants five more along the southern wall. A late frost then kills two "
        "of the new ones. How many rose bushes are left in the garden, and which of them stand along "
        "the southern wall? Explain your reasoning in short sentences, and give the number at the "
        "end.",
    ),
    "harbour": (
        False,
        "It was the custom of the town, in those days, to ring the harbour bell whenever a ship came "
        "in, and the children, who knew the bells of every parish by heart, would run down through "
        "the narrow streets to be the first upon the quay. On the morning of which I write there was "
        "a thick white mist upon the water. The bell rang three times, then was silent, and then rang "
        "again, as it had never done before. We ran all the same. My brother, being the elder, was a "
        "good way in front of me, and I could hear his boots upon the stones long after I had lost "
        "the sight of him. When I came out between the warehouses I found the whole of the town "
        "assembled there: the baker in his apron, the two Miss Pembertons with their umbrellas, the "
        "curate, the sailmaker, and a great number of fishermen who stood with their hands in their "
        "pockets and said nothing. Nobody looked at anybody else. They were all of them looking at "
        "the ship. She was a tall ship of the old kind, with three masts, and her sails hung from the "
        "yards as grey and as still as washing upon a line. There was no one at her wheel. There was "
        "no one upon her deck. And yet, as we watched, a rope was thrown from her side, quite slowly, "
        "as a man throws who is tired, and it fell upon the quay at the feet of the harbour master. "
        "He stooped, after a moment, and took it up, and turned to us, and said that",
    ),
    "letter": (
        True,
        "Below is a letter from a traveller to her sister. Read it, then say in one sentence where "
        "the traveller is and what she asks for.\n\n"
        "My dear Anne, we reached the mountain village on Tuesday after nine hours in a coach with "
        "neither springs nor cushions. The air is very thin and very clean, and I sleep better than I "
        "have slept since the winter. The people are kind to us. They bring us goats' milk in the "
        "morning, and bread, and a hard white cheese that father would have liked. Our room looks to "
        "the north, over a valley so deep that the river at the bottom of it makes no sound at all. I "
        "have only one complaint, and it is a foolish one: I came away without my grey shawl, the "
        "warm one, and the evenings are colder here than I had thought they would be. If you should "
        "find it in the chest upon the landing, would you send it to me by the carrier? He leaves "
        "from the inn on Fridays. Kiss the little ones for me, and tell them that I have seen an "
        "eagle. Your loving sister, Margaret.",
    ),
}


@functools.cache
def bridge():
    return ap.load_model()


@functools.cache
def eager():
    """A second, plain transformers model of its own."""
    model = ap.load_model(host="transformers")
    model.set_attn_implementation("eager")
    return model.eval()


@functools.cache
def prompt_ids(name: str) -> tuple[int, ...]:
    chat, text = TEXTS[name]
    tokenizer = bridge().tokenizer
    if not chat:
        return tuple(tokenizer(text)["input_ids"])
    message = [{"role": "user", "content": text}]
    return tuple(
        tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    )


@functools.cache
def alone(name: str):
    (score,) = ap.score(bridge(), [list(prompt_ids(name))], methods=METHODS, max_new_tokens=NEW_TOKENS)
    return score


@functools.cache
def reference(name: str) -> dense.Text:
    return dense.read_text(eager(), list(prompt_ids(name)), alone(name).token_ids)


def test_the_prompts_are_what_the_accuracy_is_promised_for():
    lengths = sorted(len(prompt_ids(name)) for name in TEXTS)
    assert lengths[0] >= 80
    assert lengths[-1] <= 360
    assert lengths[-1] > 300
    assert all(len(alone(name).token_ids) == NEW_TOKENS or alone(name).finish == "eos" for name in TEXTS)


@pytest.mark.parametrize("name", TEXTS)
def test_scores_equal_a_dense_float64_computation(name):
    score, text = alone(name), reference(name)
    assert text.attention.shape[:2] == (30, 9)
    for method, (uncertainty, layers) in {
        "SAUQ": dense.sauq(text),
        "SAUQ-generation": dense.sauq(text, scope="generation"),
        "RAUQ": dense.rauq(text),
        "LapEigValRAUQ": dense.sauq(text, signal=dense.mean_laplacian_eigenvalue),
        "LogDetRAUQ": dense.sauq(text, signal=dense.geometric_mean_self_attention),
    }.items():
        assert [layer.layer for layer in layers] == list(range(10, 21))
        assert score.uncertainty[method] == pytest.approx(uncertainty, abs=1e-3), method
        dense.assert_same_layers(score.assessments[method], layers, 1e-3)
    assert score.uncertainty["Perplexity"] == pytest.approx(dense.perplexity(text), abs=1e-3)
    assert score.uncertainty["MeanTokenEntropy"] == pytest.approx(dense.mean_token_entropy(text), abs=1e-3)
    assert score.uncertainty["MaximumTokenEntropy"] == pytest.approx(dense.maximum_token_entropy(text), abs=1e-3)
    surprise = dense.maximum_sequence_probability(text)
    assert score.uncertainty["MaximumSequenceProbability"] == pytest.approx(surprise, abs=1e-3)
    assert score.uncertainty["AttentionScore"] == pytest.approx(dense.attention_score(text), abs=1e-3)
    np.testing.assert_allclose(score.tokens["log_probability"], dense.token_log_probabilities(text), atol=1e-3)
    np.testing.assert_allclose(score.tokens["entropy"], dense.token_entropies(text), atol=1e-3)


def test_a_batch_with_left_padding_equals_the_single_runs():
    prompts = [list(prompt_ids(name)) for name in TEXTS]
    assert len({len(prompt) for prompt in prompts}) == 4
    batch = ap.score(bridge(), prompts, methods=METHODS, max_new_tokens=NEW_TOKENS)
    for name, together in zip(TEXTS, batch, strict=True):
        single = alone(name)
        assert together.token_ids == single.token_ids
        assert together.text == single.text
        for method in METHODS:
            assert together.uncertainty[method] == pytest.approx(single.uncertainty[method], abs=1e-4), method
            ours, theirs = together.assessments[method].layers, single.assessments[method].layers
            assert [(t.layer, t.head) for t in ours] == [(t.layer, t.head) for t in theirs], method
            for a, b in zip(ours, theirs, strict=True):
                assert a.uncertainty == pytest.approx(b.uncertainty, abs=1e-4)


@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_equals_a_dense_float64_computation(measure):
    name = "gardener"
    score = of_every_measure(name)
    text = reference(name)
    if measure == "unembedding":
        text.leverage = dense.leverage_of(eager())
    sauq = ap.SAUQ(measure=measure)
    uncertainty, layers = dense.sauq(text, measure=measure)
    assert score.uncertainty[sauq.name] == pytest.approx(uncertainty, abs=1e-3)
    dense.assert_same_layers(score.assessments[sauq.name], layers, 1e-3)


@functools.cache
def of_every_measure(name: str):
    """Forced scoring of the generated answer, all measures in one forward."""
    methods = [ap.SAUQ(measure=measure) for measure in MEASURES]
    (score,) = ap.score(bridge(), [list(prompt_ids(name))], completions=[alone(name).token_ids], methods=methods)
    return score


def test_forced_scoring_equals_generation():
    single, forced = alone("gardener"), of_every_measure("gardener")
    assert forced.token_ids == single.token_ids
    assert forced.uncertainty["SAUQ"] == pytest.approx(single.uncertainty["SAUQ"], abs=1e-4)


def test_a_chat_prompt_as_text_is_the_same_prompt():
    chat, text = TEXTS["gardener"]
    assert chat
    (score,) = ap.score(bridge(), text, chat=True, max_new_tokens=2)
    assert score.prompt_ids == list(prompt_ids("gardener"))
    assert score.token_ids == alone("gardener").token_ids[:2]


def test_an_answer_ends_at_the_end_of_turn_token():
    (score,) = ap.score(bridge(), "Answer with one word: what colour is the sky?", chat=True, max_new_tokens=40)
    assert score.finish == "eos"
    assert score.token_ids[-1] == bridge().tokenizer.eos_token_id
    assert len(score.tokens) == len(score.token_ids) < 40
    assert "<|im_end|>" not in score.text
    assert "<|im_end|>" in "".join(score.tokens["token"])


def test_a_stop_string_ends_an_answer():
    whole = alone("gardener")
    assert "," in whole.text
    (score,) = ap.score(
        bridge(),
        [list(prompt_ids("gardener"))],
        methods=METHODS,
        max_new_tokens=NEW_TOKENS,
        stop=["\n\n\n", ","],
    )
    assert score.finish == "stop"
    assert score.text == whole.text.split(",")[0]
    n = len(score.token_ids)
    assert n < NEW_TOKENS
    assert score.token_ids == whole.token_ids[:n]
    np.testing.assert_allclose(score.tokens["probability"], whole.tokens["probability"][:n], atol=1e-5)


def test_a_users_own_generate_that_returns_text_needs_the_last_token():
    sauq, prompt = ap.SAUQ(), "The river ran down from the hills and through the old"
    probe = sauq.probe()
    with probe.attach(bridge()):
        text = bridge().generate(prompt, max_new_tokens=4, do_sample=False, verbose=False)
    with pytest.raises(ValueError, match="tokens="):
        sauq.score(probe)
    tokenizer = bridge().tokenizer
    ids = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    (score,) = ap.score(bridge(), [ids], max_new_tokens=4)
    assert text == prompt + score.text  # the host's own generate put BOS before the text
    (assessment,) = sauq.score(probe, tokens=torch.tensor([score.token_ids]))
    assert assessment.uncertainty == pytest.approx(score.uncertainty["SAUQ"], abs=1e-4)
