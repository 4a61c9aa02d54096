"""Sampled answers on tiny random models: what is drawn, how probable it is, and `score` with sampled methods."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import VOCAB, tiny_model
from transformers.cache_utils import DynamicCache, LinearAttentionLayer
from uncertainty.sampled import RuleNLI, words

import attnprobe as ap
from attnprobe.functional import luq, semantic_classes, semantic_entropy
from attnprobe.hosts import host_of
from attnprobe.hosts.caches import repeated
from attnprobe.uncertainty import SamplingSettings
from attnprobe.uncertainty.decode import Decoding, greedy
from attnprobe.uncertainty.sampling import Sampling, _pick

ARCHITECTURES = ("llama", "gpt2", "mistral", "gemma2", "neox", "qwen2")
HOSTS = ("bridge", "plain")
PROMPT = [5, 9, 23, 44, 8, 61, 12, 17, 33, 70, 21]
SHORT = [11, 6, 15]
EVERYTHING = SamplingSettings(top_k=None)


@functools.cache
def model_on(host: str, architecture: str = "llama", double: bool = True, **changes):
    """In float64 unless said otherwise."""
    plain = tiny_model(architecture, attention="eager" if architecture == "gemma2" else "sdpa", **changes)
    plain = plain.double() if double else plain
    return ap.load_model(plain) if host == "bridge" else plain


def exactly(host: str, architecture: str = "llama") -> float:
    """How near a float64 model comes: eager attention of some architectures has its softmax in float32."""
    eager = host == "bridge" or architecture == "gemma2"
    return 1e-5 if eager and architecture not in ("gpt2", "neox") else 1e-9


def sampling(model, seed: int = 0, batch_size: int = 8, **decoding) -> Sampling:
    how = Decoding(**{"max_new_tokens": 6, "choose": greedy, **decoding})
    return Sampling(host_of(model), how, torch.device("cpu"), batch_size, seed, lambda tokens, _: str(tokens))


def by_forward(model, prompt: list[int], tokens: list[int]) -> float:
    """Log-probability of the tokens, from one forward of the plain model over all of the text."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1)[torch.arange(len(tokens)), tokens].sum().item()


def assert_same_samples(some, others, tolerance: float = 1e-9) -> None:
    assert [one.token_ids for one in some] == [one.token_ids for one in others]
    assert [one.finish for one in some] == [one.finish for one in others]
    np.testing.assert_allclose(
        [one.log_probability for one in some], [one.log_probability for one in others], atol=tolerance, rtol=0
    )


# --- log-probabilities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("host", HOSTS)
def test_log_probabilities_are_those_of_one_forward_over_the_text(host, architecture):
    """On a repeated cache, under a sliding window too, whatever shaped the draw."""
    settings = SamplingSettings(n_samples=4, temperature=1.5, top_k=30, top_p=0.95)
    samples = sampling(model_on(host, architecture)).draw(PROMPT, 0, settings)
    assert len({tuple(sample.token_ids) for sample in samples}) > 1
    for sample in samples:
        assert len(sample.token_ids) == 6
        expected = by_forward(model_on("plain", architecture), PROMPT, sample.token_ids)
        assert sample.log_probability == pytest.approx(expected, abs=exactly(host, architecture))


@pytest.mark.parametrize("host", HOSTS)
def test_log_probabilities_are_those_of_given_answers_in_float32(host):
    model = model_on(host, double=False)
    (score,) = ap.score(
        model, [PROMPT], methods=ap.SemanticEntropy(nli=RuleNLI()), tokenizer=words(), seed=3, max_new_tokens=6
    )
    answers = [sample.token_ids for sample in score.samples]
    given = ap.score(model, [PROMPT] * len(answers), completions=answers, methods="Perplexity")
    for sample, forced in zip(score.samples, given, strict=True):
        assert sample.log_probability == pytest.approx(forced.tokens["log_probability"].sum(), abs=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("host", HOSTS)
def test_a_repeated_cache_gives_what_reading_the_prompt_again_gives(host, architecture, monkeypatch):
    shared = sampling(model_on(host, architecture)).draw(PROMPT, 0, EVERYTHING)
    read = []
    monkeypatch.setattr("attnprobe.uncertainty.sampling.repeated", lambda cache, n: read.append(n))
    assert_same_samples(sampling(model_on(host, architecture)).draw(PROMPT, 0, EVERYTHING), shared)
    assert read == [5, 5]


def test_the_prompt_is_read_once(monkeypatch):
    model, widths = model_on("plain"), []
    host = host_of(model)
    decode = host.decode
    monkeypatch.setattr(host, "decode", lambda tokens, *rest: widths.append(tokens.shape) or decode(tokens, *rest))
    Sampling(host, Decoding(3, greedy), torch.device("cpu"), 4, 0, lambda *_: "").draw(PROMPT, 0, EVERYTHING)
    assert widths == [(1, len(PROMPT)), *[(4, 1)] * 2, *[(3, 1)] * 4]


# --- what is drawn ----------------------------------------------------------------------------------------


def test_a_draw_takes_the_token_in_whose_share_its_chance_falls():
    probability = torch.tensor([0.1, 0.0, 0.6, 0.3, 0.0], dtype=torch.float64)
    chance = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    picked = _pick(probability.expand(1000, -1), chance)
    assert picked.bincount(minlength=5).tolist() == [100, 0, 600, 300, 0]
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert _pick(probability.expand(2, -1), edges).tolist() == [0, 3]
    unsummed = torch.tensor([0.0, 0.3, 0.3, 0.0], dtype=torch.float64)  # rounding may leave a sum below 1, or above
    assert _pick(unsummed.expand(2, -1), edges).tolist() == [1, 2]
    assert _pick((unsummed * 3).expand(2, -1), edges).tolist() == [1, 2]


def test_first_tokens_are_drawn_as_often_as_they_are_probable():
    n = 2000
    settings = SamplingSettings(n_samples=n, temperature=2.0, top_k=5)
    drawn = sampling(model_on("plain"), batch_size=n, max_new_tokens=1).draw(PROMPT, 0, settings)
    with torch.no_grad():
        logits = model_on("plain")(torch.tensor([PROMPT])).logits[0, -1]
    best = logits.topk(5)
    probability = torch.zeros(VOCAB, dtype=torch.float64)
    probability[best.indices] = (best.values / 2.0).softmax(-1)
    counts = np.bincount([sample.token_ids[0] for sample in drawn], minlength=VOCAB)
    assert counts[probability.numpy() == 0].sum() == 0
    expected, deviation = n * probability.numpy(), (n * probability * (1 - probability)).sqrt().numpy()
    assert (np.abs(counts - expected) <= 4 * deviation).all()


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(3, top_k=1),
        SamplingSettings(3, top_p=1e-6),
        SamplingSettings(3, temperature=1e-4, top_k=None),
    ],
    ids=["top_k", "top_p", "temperature"],
)
def test_narrow_settings_draw_the_greedy_answer(settings):
    (answer,) = ap.score(model_on("plain"), [PROMPT], methods="Perplexity", max_new_tokens=6)
    for sample in sampling(model_on("plain")).draw(PROMPT, 0, settings):
        assert sample.token_ids == answer.token_ids


@pytest.mark.parametrize("host", HOSTS)
def test_a_sample_depends_on_seed_prompt_and_its_own_numbers_alone(host):
    model = model_on(host)
    expected = sampling(model).draw(PROMPT, 4, EVERYTHING)
    for batch_size in (1, 3, 10, 99):
        assert_same_samples(sampling(model, batch_size=batch_size).draw(PROMPT, 4, EVERYTHING), expected)
    fewer = sampling(model).draw(PROMPT, 4, SamplingSettings(3, top_k=None))
    assert_same_samples(fewer, expected[:3])
    shorter = sampling(model, max_new_tokens=2).draw(PROMPT, 4, EVERYTHING)
    assert [one.token_ids for one in shorter] == [one.token_ids[:2] for one in expected]
    for other in (sampling(model, seed=1).draw(PROMPT, 4, EVERYTHING), sampling(model).draw(PROMPT, 5, EVERYTHING)):
        assert [one.token_ids for one in other] != [one.token_ids for one in expected]


# --- how a sample ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_a_sample_ends_at_a_stop_token_and_leaves_the_others_alone(host):
    model = model_on(host)
    free = sampling(model).draw(PROMPT, 0, EVERYTHING)
    # every third token id ends an answer
    stop_tokens = tuple(range(0, VOCAB, 3))
    ended = sampling(model, stop_tokens=stop_tokens).draw(PROMPT, 0, EVERYTHING)
    lengths = set()
    for sample, whole in zip(ended, free, strict=True):
        end = next((i for i, token in enumerate(whole.token_ids) if token in stop_tokens), None)
        expected = whole.token_ids if end is None else whole.token_ids[: end + 1]
        assert (sample.token_ids, sample.finish) == (expected, "length" if end is None else "eos")
        assert sample.log_probability == pytest.approx(
            by_forward(model_on("plain"), PROMPT, expected), abs=exactly(host)
        )
        lengths.add(len(expected))
    assert len(lengths) > 2


def test_decoding_ends_with_the_last_sample(monkeypatch):
    model = model_on("plain")
    host, calls = host_of(model), []
    decode = host.decode
    monkeypatch.setattr(host, "decode", lambda *given: calls.append(given) or decode(*given))
    how = Decoding(6, greedy, stop_tokens=tuple(range(VOCAB)))
    samples = Sampling(host, how, torch.device("cpu"), 10, 0, lambda *_: "").draw(PROMPT, 0, EVERYTHING)
    assert [len(sample.token_ids) for sample in samples] == [1] * 10
    assert len(calls) == 1


@pytest.mark.parametrize("host", HOSTS)
def test_stop_strings_cut_the_text_and_not_the_tokens(host):
    model, given = model_on(host), dict(methods=ap.LUQ(nli=RuleNLI()), tokenizer=words(), seed=2, max_new_tokens=5)
    (free,) = ap.score(model, [PROMPT], **given)
    first = free.samples[0]
    stop = f"w{first.token_ids[2]} w{first.token_ids[3]}"
    (stopped,) = ap.score(model, [PROMPT], stop=stop, **given)
    assert (stopped.samples[0].token_ids, stopped.samples[0].finish) == (first.token_ids[:4], "stop")
    assert stopped.samples[0].text.split() == first.text.split()[:2]
    expected = by_forward(model_on("plain"), PROMPT, first.token_ids[:4])
    assert stopped.samples[0].log_probability == pytest.approx(expected, abs=exactly(host))
    assert any(sample.finish == "length" for sample in stopped.samples)


def test_the_end_token_counts_and_is_not_text():
    model = model_on("plain", eos_token_id=2)
    with torch.no_grad():
        model.lm_head.weight.data[2] *= 3  # so that some answers end
    try:
        (score,) = ap.score(
            model, [PROMPT], methods=ap.LUQ(nli=RuleNLI(), n_samples=40), tokenizer=words(), seed=0, max_new_tokens=8
        )
    finally:
        model_on.cache_clear()
    ended = [sample for sample in score.samples if sample.finish == "eos"]
    assert ended
    for sample in ended:
        assert sample.token_ids[-1] == 2
        assert sample.text.split() == [f"w{token}" for token in sample.token_ids[:-1]]
        assert sample.log_probability == pytest.approx(by_forward(model, PROMPT, sample.token_ids), abs=1e-9)


# --- score ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_score_is_what_its_samples_say(host):
    nli = RuleNLI(key=lambda text: int(text.split()[0][1:]) % 3)  # three meanings
    methods = ["SAUQ", ap.LUQ(nli=nli), "Perplexity", ap.SemanticEntropy(nli=nli)]
    model = model_on(host, double=False)  # a padded batch in float64 is NaN on an eager host
    scores = ap.score(model, [PROMPT, SHORT], methods=methods, tokenizer=words(), seed=5, max_new_tokens=5)
    for score in scores:
        assert list(score.uncertainty) == list(score.assessments) == ["SAUQ", "LUQ", "Perplexity", "SemanticEntropy"]
        logits = nli.matrix([sample.text for sample in score.samples])
        classes = semantic_classes(logits.argmax(-1) == 0)
        assert 1 < int(classes.max()) + 1 <= 3
        log_p = torch.tensor([sample.log_probability for sample in score.samples], dtype=torch.float64)
        assert score.uncertainty["SemanticEntropy"] == pytest.approx(semantic_entropy(log_p, classes).item(), abs=1e-9)
        expected = luq(logits[..., 0].double(), logits[..., 2].double()).item()
        assert score.uncertainty["LUQ"] == pytest.approx(expected, abs=1e-9)
        assert score.assessments["SemanticEntropy"].classes == tuple(classes.tolist())
        assert score.assessments["LUQ"].samples == tuple(score.samples)
        assert [sample.text for sample in score.samples] == [
            " ".join(f"w{token}" for token in sample.token_ids) for sample in score.samples
        ]
    assert scores[0].samples != scores[1].samples


@pytest.mark.parametrize("host", HOSTS)
def test_the_answer_and_its_single_pass_scores_stay_as_they_were(host):
    model, given = model_on(host, double=False), dict(tokenizer=words(), max_new_tokens=5)
    semantic = ap.SemanticEntropy(nli=RuleNLI())
    single = ap.score(model, [PROMPT, SHORT], methods=["SAUQ", "RAUQ"], **given)
    both = ap.score(model, [PROMPT, SHORT], methods=["SAUQ", "RAUQ", semantic], **given)
    alone = ap.score(model, [PROMPT, SHORT], methods=semantic, **given)
    for one, other, sampled in zip(single, both, alone, strict=True):
        assert one.samples == []
        assert one.token_ids == other.token_ids == sampled.token_ids
        assert {name: other.uncertainty[name] for name in one.uncertainty} == one.uncertainty
        assert list(sampled.uncertainty) == ["SemanticEntropy"]
        assert sampled.tokens["log_probability"].tolist() == pytest.approx(one.tokens["log_probability"].tolist())
        assert "signal" not in sampled.tokens


def test_methods_of_equal_settings_share_samples_and_comparisons(monkeypatch):
    drawn, draw = [], Sampling.draw
    monkeypatch.setattr(Sampling, "draw", lambda self, *given: drawn.append(given[1:]) or draw(self, *given))
    nli = RuleNLI()
    methods = [
        ap.LUQ(nli=nli),
        ap.SemanticEntropy(nli=nli),
        ap.SemanticEntropy(nli=nli, estimate="direct"),
        ap.SemanticEntropy(nli=nli, n_samples=4),
    ]
    scores = ap.score(model_on("plain"), [PROMPT, SHORT], methods=methods, tokenizer=words(), max_new_tokens=3)
    ten, four = SamplingSettings(), SamplingSettings(4)
    assert drawn == [(0, ten), (0, four), (1, ten), (1, four)]
    assert [len(asked) for asked in nli.asked] == [10, 4, 10, 4]
    for score in scores:
        assert [len(score.assessments[method.name].samples) for method in methods] == [10, 10, 10, 4]
        assert score.samples == list(score.assessments["LUQ"].samples)


def test_given_completions_are_scored_and_samples_come_from_the_prompt():
    given = dict(methods=["Perplexity", ap.LUQ(nli=RuleNLI())], tokenizer=words(), seed=1, max_new_tokens=4)
    (read,) = ap.score(model_on("plain"), [PROMPT], completions=[[7, 8, 9, 10, 11, 12]], **given)
    (generated,) = ap.score(model_on("plain"), [PROMPT], **given)
    assert (read.token_ids, read.finish) == ([7, 8, 9, 10, 11, 12], "given")
    assert_same_samples(read.samples, generated.samples)
    assert read.uncertainty["LUQ"] == generated.uncertainty["LUQ"]
    assert read.uncertainty["Perplexity"] != generated.uncertainty["Perplexity"]


def test_seeds():
    def texts(**given):
        scores = ap.score(
            model_on("plain"), [PROMPT, SHORT], methods=ap.LUQ(nli=RuleNLI()), tokenizer=words(), max_new_tokens=4,
            **given,
        )  # fmt: skip
        return [[sample.text for sample in score.samples] for score in scores]

    assert texts(seed=1) == texts(seed=1) == texts(seed=1, batch_size=1)
    assert texts(seed=1) != texts(seed=2)
    assert texts(seed=-1) == texts(seed=-1)
    torch.manual_seed(0)
    first, second = texts(), texts()
    assert first != second
    torch.manual_seed(0)
    assert texts() == first
    state = torch.get_rng_state()
    ap.score(model_on("plain"), [PROMPT], methods="Perplexity", max_new_tokens=2)
    texts(seed=3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"tokenizer": None}, ValueError, "sampled answers are text and the model has no tokenizer"),
        ({"completions": [[5]], "max_new_tokens": 120}, ValueError, "makes 131 with its answer, and the model reads"),
        ({"methods": [ap.LUQ(), ap.LUQ()]}, ValueError, "methods names LUQ twice"),
        ({"methods": ap.LUQ}, TypeError, r"LUQ is a class: write LUQ\(\)"),
        ({"methods": "SemanticEntrophy"}, ValueError, "did you mean 'SemanticEntropy'"),
        ({"methods": []}, ValueError, "name at least one of .*, SemanticEntropy, LUQ"),
    ],
)
def test_errors_are_one_sentence(given, error, sentence):
    given = {"methods": ap.LUQ(nli=RuleNLI()), "tokenizer": words(), **given}
    with pytest.raises(error, match=sentence) as raised:
        ap.score(model_on("plain"), [PROMPT], **given)
    assert "\n" not in str(raised.value)


def test_an_nli_model_that_will_not_do_is_refused_before_anything_is_generated(monkeypatch):
    class TwoLabels(RuleNLI):
        label_names = ("entailment", "not_entailment")

    def never(*given):
        raise AssertionError("something was generated")

    monkeypatch.setattr("attnprobe.hosts.transformers.TransformersHost.decode", never)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    given = dict(tokenizer=words(), max_new_tokens=3)
    with pytest.raises(ValueError, match="LUQ needs an NLI model that tells contradiction"):
        ap.score(model_on("plain"), [PROMPT], methods=ap.LUQ(nli=TwoLabels()), **given)
    with pytest.raises(OSError, match="the NLI model 'nobody/no-such-model' was not found on this machine"):
        ap.score(model_on("plain"), [PROMPT], methods=ap.SemanticEntropy(nli="nobody/no-such-model"), **given)


# --- caches -----------------------------------------------------------------------------------------------


def test_repeating_a_cache_leaves_it_as_it_is():
    model = model_on("plain", "mistral")
    with torch.no_grad():
        cache = model(torch.tensor([PROMPT]), use_cache=True).past_key_values
    before = [layer.keys.clone() for layer in cache.layers]
    ours = repeated(cache, 3)
    for layer, other, keys in zip(cache.layers, ours.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(other.keys, keys.expand(3, -1, -1, -1))
        assert other.values.shape[0] == 3


def test_a_cache_that_holds_more_than_keys_and_values_is_not_repeated():
    cache = DynamicCache()
    assert repeated(cache, 2) is not None
    cache.layers.append(LinearAttentionLayer.__new__(LinearAttentionLayer))
    assert repeated(cache, 2) is None
    assert repeated(((torch.zeros(1, 1, 1, 1),) * 2,), 2) is None


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_lens.HookedTransformer") is None,
    reason="this transformer-lens has no HookedTransformer",
)
def test_a_hooked_transformer(monkeypatch):
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=3, d_model=32, n_ctx=128, d_head=8, n_heads=4, d_vocab=VOCAB, act_fn="gelu", seed=0, device="cpu",
        init_weights=True, initializer_range=0.3, normalization_type="LN", positional_embedding_type="rotary",
        rotary_dim=8,
    )  # fmt: skip
    model = HookedTransformer(config).eval()
    stop_tokens = tuple(range(0, VOCAB, 3))
    samples = sampling(model, stop_tokens=stop_tokens).draw(PROMPT, 0, EVERYTHING)
    assert len({len(sample.token_ids) for sample in samples}) > 1
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *sample.token_ids]]))[0, len(PROMPT) - 1 : -1]
        own = logits.double().log_softmax(-1)[torch.arange(len(sample.token_ids)), sample.token_ids].sum().item()
        assert sample.log_probability == pytest.approx(own, abs=1e-4)
    monkeypatch.setattr("attnprobe.uncertainty.sampling.repeated", lambda cache, n: None)
    assert_same_samples(sampling(model, stop_tokens=stop_tokens).draw(PROMPT, 0, EVERYTHING), samples, 1e-4)


# --- the documentation ------------------------------------------------------------------------------------


def test_the_example_of_the_documentation_runs(monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text(encoding="utf-8")
    example, *others = re.findall(r"```python\n(# runs as it is.*?)```", text, re.DOTALL)
    assert others == []
    model = tiny_model("llama", attention="sdpa")
    model.tokenizer = words()
    monkeypatch.setattr(ap, "load_model", lambda *args, **kwargs: model)
    names: dict[str, object] = {}
    exec(compile(example, "docs/sampling.md", "exec"), names)
    (score,) = names["out"]
    assert set(score.uncertainty) == {"SAUQ", "SemanticEntropy", "LUQ"}
    assert len(score.samples) == 10
    assert str(score.uncertainty["LUQ"]) in capsys.readouterr().out
