"""The code of docs/uncertainty.md runs, and the scores that it defines are what it says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tiny import VOCAB, tiny_bridge, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from uncertainty import dense

import attnprobe as ap
from attnprobe.uncertainty import Evidence, method_names

PAGE = Path(__file__).parents[2] / "docs" / "uncertainty.md"
WORDS = ["Who", "wrote", "Hamlet", "?", "What", "is", "the", "boiling", "point", "of", "water"]


@pytest.fixture(scope="module")
def page():
    """Everything that the code of the page defines, on a tiny model in place of the embedded one."""
    model = tiny_bridge("llama")
    vocabulary = {WORDS[i - 3] if 3 <= i < 3 + len(WORDS) else f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    namespace: dict = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ap, "load_model", lambda: model)
        for block in blocks:
            exec(block, namespace)
    assert len(blocks) == 3
    return namespace


def sink_mass(block: np.ndarray) -> float:
    return float(np.mean([row[0] for row in block]))


def one_minus_last_diagonal(block: np.ndarray) -> float:
    return 1 - float(block[-1, -1])


def by_mean_signal(text: dense.Text, signal) -> tuple[float, list[dense.Layer]]:
    """The recurrence at the head with the largest mean signal."""

    def signal_of(layer: int, head: int, step: int) -> float:
        return signal(dense.prefix_block(text, layer, head, step))

    def choose(layer: int) -> int:
        steps = range(2, text.n_tokens + 1)
        means = [np.mean([signal_of(layer, head, t) for t in steps]) for head in range(text.attention.shape[1])]
        return dense.first_best(means)

    weight = np.exp(dense.token_log_probabilities(text))
    return dense._score(dense.middle_layers(len(text.attention)), choose, signal_of, weight, 0.2)


def test_scores_of_ones_own_are_what_the_page_says(page):
    kinds = [page["SinkUQ"], page["ScreenedSink"], page["Doubt"]]
    scores = ap.score(page["model"], page["prompts"], methods=[kind() for kind in kinds], max_new_tokens=7)
    for score in scores:
        assert len(score.prompt_ids) >= 4
        text = dense.read_text(tiny_model("llama"), score.prompt_ids, score.token_ids)
        for name, (uncertainty, layers) in {
            "SinkUQ": by_mean_signal(text, sink_mass),
            "ScreenedSink": dense.sauq(text, signal=sink_mass),
            "Doubt": by_mean_signal(text, one_minus_last_diagonal),
        }.items():
            assert score.uncertainty[name] == pytest.approx(uncertainty, abs=1e-4), name
            dense.assert_same_layers(score.assessments[name], layers, 1e-4)
        assert set(score.layers("SinkUQ").columns) == {"layer", "head", "step", "signal", "confidence"}


def test_every_score_that_has_a_name_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    measures = ("SAUQ-counting", "SAUQ-positional", "SAUQ-zipf", "SAUQ-unembedding")
    for name in method_names(sampled=False):
        shown = f"`{name}`" if name not in measures[1:] else f"`-{name.split('-')[1]}`"
        assert shown in text, name


def test_a_score_that_names_no_signal_says_so():
    class Forgot(ap.Recurrent):
        name = "Forgot"

        def analyzers(self):
            return [ap.SelfAttention(trace=True)]

    made = Evidence(np.zeros(2), np.zeros(2), {"self_attention": np.full((1, 1, 2), 0.5)}, (0,), (0,), 1, 9)
    with pytest.raises(NotImplementedError, match="Forgot must name its signal"):
        Forgot().assess(made)
    Forgot.signal = "self_attention"
    assert Forgot().assess(made).uncertainty == pytest.approx(1 - np.log([1, 0.2 + 0.8 * 0.5]).mean())
    Forgot.signal = "sink_mass"
    with pytest.raises(
        ValueError, match=r"reads the trace of 'sink_mass' and there is none \(there are self_attention traces"
    ):
        Forgot().assess(made)
    Forgot.signal = "self_attention"
    high = Evidence(np.zeros(2), np.zeros(2), {"self_attention": np.full((1, 1, 2), 1.5)}, (4,), (7,), 5, 9)
    with pytest.raises(ValueError, match=r"the signal of Forgot is 1\.5 in layer 4, head 7, step 2: a routing signal"):
        Forgot(layers=[4]).assess(high)


def test_tokens_are_ids_and_models_are_no_names():
    probe = ap.Probe([ap.SelfAttention(trace=True)], logits=True)
    for wrong in ("abc", [1, 2], np.zeros((1, 2))):
        with pytest.raises(TypeError, match="tokens are the generated ids"):
            ap.RAUQ().score(probe, wrong)
    with pytest.raises(TypeError, match=r"str is neither: load one by its name with attnprobe.load_model\('gpt2'\)"):
        ap.score("gpt2", "a prompt")


def test_the_length_that_the_page_speaks_of():
    """U = 1 + Perplexity + (T - 1)/T log(1/a) where nothing is carried over."""
    log_p = np.log([0.9, 0.5, 0.7, 0.3])
    made = Evidence(log_p, np.zeros(4), {"self_attention": np.zeros((1, 1, 4))}, (0,), (0,), 1, 9)

    class Alone(ap.Recurrent):
        name, signal = "Alone", "self_attention"

    assert Alone(layers=[0]).assess(made).uncertainty == pytest.approx(1 - log_p.mean() + 0.75 * np.log(5))


def test_numbers_that_are_none():
    with pytest.raises(ValueError, match=r"max_rejection is '0\.5'"):
        ap.metrics.prediction_rejection_ratio([1, 2, 3, 4], [1, 0, 1, 0], "0.5")
    with pytest.raises(TypeError, match="scores is a list: give a name and an array for each"):
        ap.metrics.compare([[1, 2, 3, 4]], [1, 0, 1, 0])
