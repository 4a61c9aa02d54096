"""Features of answers: the numbers, how texts are read, and how features are kept."""

from __future__ import annotations

import contextlib

import filelock
import numpy as np
import pytest
import torch
from detection.made import model, token_ids
from stream.dense import dense_tdo
from tiny import tiny_model

from attnprobe import detection
from attnprobe.detection import FeatureSettings, features_of
from attnprobe.detection import features as features_module
from attnprobe.detection.reading import reading_of

ALL = FeatureSettings(list(detection.KINDS), k=6, max_tokens=128)
FIVE = [(0, 1), (0, 3), (1, 0), (2, 2), (1, 3)]


def texts():
    return token_ids(20, 9, 31, seed=1), token_ids(3, 8, 5, seed=2)


def sorted_top(values: list[float], k: int) -> list[float]:
    return sorted(values, reverse=True)[:k]


def dense_features(a: torch.Tensor, k: int) -> dict[str, float]:
    """Every feature of one head from its whole pattern in float64, by loops."""
    n = len(a)
    eigenvalues = torch.linalg.eigvalsh(dense_tdo(a)).tolist()
    laplacian = [sum(float(a[u, i]) for u in range(i, n)) / (n - i) - float(a[i, i]) for i in range(n)]
    found = {f"tdo_eigenvalue_{i + 1}": value for i, value in enumerate(sorted_top([*eigenvalues, *[0.0] * k], k))}
    found |= {f"laplacian_eigenvalue_{i + 1}": value for i, value in enumerate(sorted_top(laplacian, k))}
    found |= {f"self_attention_{i + 1}": value for i, value in enumerate(sorted_top(a.diagonal().tolist(), k))}
    conductance = []
    for t in range(1, n):
        crossing = float(a[:t, t:].sum() + a[t:, :t].sum())
        volume = float(a[:t].sum() + a[:, :t].sum())
        conductance.append(crossing / min(volume, 2 * n - volume))
    found["phi"] = min(conductance)
    found["cut"] = (1 + int(np.argmin(conductance))) / n
    skew = (a - a.T) / 2
    found["asymmetry"] = float(skew.norm() / a.norm())
    return found


@pytest.mark.parametrize("host", ["bridge", "transformers"])
def test_five_heads_against_eager_attention_in_float64(host):
    prompts, answers = texts()
    settings = FeatureSettings(ALL.kinds, heads=FIVE, k=6, max_tokens=128)
    found = features_of(model(host), prompts, answers, settings, progress=False)
    assert found.values.shape == (3, 5 * (3 * 6 + 3))
    assert len(found.columns) == found.values.shape[1]
    eager = tiny_model("llama").double()
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        with torch.no_grad():
            layers = eager(torch.tensor([[*prompt, *answer]]), output_attentions=True).attentions
        dense = {head: dense_features(layers[head[0]][0, head[1]], 6) for head in FIVE}
        for column, value in zip(found.columns, found.values[i], strict=True):
            expected = dense[column.layer, column.head][column.variable]
            assert value == pytest.approx(expected, abs=2e-5), column


def test_nothing_depends_on_the_batch_or_on_the_host():
    prompts, answers = texts()
    alone = features_of(model(), prompts, answers, ALL, batch_size=1, progress=False)
    together = features_of(model(), prompts, answers, ALL, batch_size=3, progress=False)
    bridge = features_of(model("bridge"), prompts, answers, ALL, progress=False)
    # a cut may move where two cuts are equally bad, which these texts do not have
    np.testing.assert_allclose(together.values, alone.values, atol=1e-5)
    np.testing.assert_allclose(bridge.values, alone.values, atol=2e-5)
    assert alone.model == bridge.model
    assert alone.prompt_tokens.tolist() == [20, 9, 31]
    assert alone.answer_tokens.tolist() == [3, 8, 5]
    assert alone.heads == tuple((layer, head) for layer in range(3) for head in range(4))


def test_chosen_heads_and_sets_are_columns_of_all():
    prompts, answers = texts()
    whole = features_of(model(), prompts, answers, ALL, progress=False)
    some = features_of(
        model(), prompts, answers, FeatureSettings("tdo", heads=FIVE, k=6, max_tokens=128), progress=False
    )
    place = {column: i for i, column in enumerate(whole.columns)}
    np.testing.assert_allclose(some.values, whole.values[:, [place[c] for c in some.columns]], atol=1e-6)
    only = whole.only("transport", "laplacian")
    assert only.settings.kinds == ("laplacian", "transport")
    np.testing.assert_array_equal(only.values, whole.values[:, [place[c] for c in only.columns]])
    np.testing.assert_array_equal(whole[np.array([2, 0])].values, whole.values[[2, 0]])
    with pytest.raises(ValueError, match="no features diagonal"):
        only.only("diagonal")


def test_a_long_prompt_loses_its_middle_and_that_is_counted():
    (prompt,), (answer,) = token_ids(60, seed=3), token_ids(4, seed=4)
    settings = FeatureSettings("transport", max_tokens=30)
    found = features_of(model(), [prompt, prompt[:26]], [answer, answer], settings, progress=False)
    assert found.cut.tolist() == [34, 0]
    assert found.truncated == 1
    assert found.prompt_tokens.tolist() == [26, 26]
    by_hand = features_of(model(), [prompt[:13] + prompt[-13:]], [answer], settings, progress=False)
    np.testing.assert_allclose(found.values[0], by_hand.values[0], atol=1e-6)
    for keep in range(16, 60):
        reading = reading_of(prompt, answer, None, keep + 4, "text 0")
        assert len(reading) == keep + 4
        assert reading.answer == answer
        assert reading.cut == 60 - keep
        assert reading.prompt[: keep - keep // 2] + reading.prompt[len(reading.prompt) - keep // 2 :] == reading.prompt


def test_strings_are_parted_by_one_space():
    tokenizer = model().tokenizer
    for prompt, answer in (("w5 w6", "w7"), ("w5 w6 ", "w7"), ("w5 w6", " w7"), ("w5 w6\n", "w7")):
        reading = reading_of(prompt, answer, tokenizer, 20, "text 0")
        assert (reading.prompt, reading.answer) == ([5, 6], [7])
    parted = {}
    for prompt, answer in (("a", "b"), ("a ", "b"), ("a", " b")):
        seen: list[str] = []
        with contextlib.suppress(ValueError):
            reading_of(prompt, answer, lambda text, seen=seen, **_: (seen.append(text), {"input_ids": [3]})[1], 9, "t")
        parted[prompt, answer] = seen
    assert list(parted.values()) == [["a", " b"], ["a ", "b"], ["a", " b"]]


# -- kept on disk ----------------------------------------------------------------------------------------------

SETTINGS = FeatureSettings(["tdo", "transport"], k=3, max_tokens=64)
PROMPTS, ANSWERS = token_ids(*range(5, 17), seed=5), token_ids(*[3] * 12, seed=6)


def kept(folder, prompts=PROMPTS, answers=ANSWERS, settings=SETTINGS, **how):
    return features_of(model(), prompts, answers, settings, folder=folder, batch_size=4, progress=False, **how)


@pytest.fixture
def batches(monkeypatch):
    """How many texts each forward has read."""
    read, seen = features_module._read, []

    def counted(host, batch, settings, heads):
        seen.append(len(batch))
        if len(seen) == stop.get("at"):
            raise KeyboardInterrupt
        return read(host, batch, settings, heads)

    stop: dict[str, int] = {}
    seen_and_stop = (seen, stop)
    monkeypatch.setattr(features_module, "_read", counted)
    return seen_and_stop


def test_a_run_that_was_ended_goes_on(tmp_path, batches):
    seen, stop = batches
    stop["at"] = 3
    with pytest.raises(KeyboardInterrupt):
        kept(tmp_path)
    assert seen == [4, 4, 4]
    (tmp_path / ".part-000003.npz.partial").write_bytes(b"half a part")
    stop.clear()
    seen.clear()
    found = kept(tmp_path)
    assert seen == [4]  # two batches were there
    assert not list(tmp_path.glob(".*.partial"))
    again = kept(tmp_path)
    assert seen == [4]
    np.testing.assert_array_equal(again.values, found.values)
    np.testing.assert_allclose(found.values, kept(None).values, atol=1e-6)


def test_more_texts_in_any_order_cost_only_the_new_ones(tmp_path, batches):
    seen, _ = batches
    first = kept(tmp_path, PROMPTS[:8], ANSWERS[:8])
    seen.clear()
    order = [9, 2, 7, 11, 2]
    found = kept(tmp_path, [PROMPTS[i] for i in order], [ANSWERS[i] for i in order])
    assert seen == [2]
    np.testing.assert_array_equal(found.values[[1, 2, 4]], first.values[[2, 7, 2]])


def test_a_damaged_part_is_told_and_read_again(tmp_path, batches):
    seen, _ = batches
    whole = kept(tmp_path)
    part = tmp_path / "part-000002.npz"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    seen.clear()
    with pytest.warns(UserWarning, match=r"part-000002\.npz is damaged"):
        found = kept(tmp_path)
    assert seen == [4]
    np.testing.assert_allclose(found.values, whole.values, atol=1e-6)
    assert (tmp_path / "_damaged-part-000002.npz").exists()
    assert kept(tmp_path).values.shape == whole.values.shape  # and no warning again


def test_a_folder_holds_features_of_one_kind(tmp_path):
    kept(tmp_path)
    with pytest.raises(ValueError, match=r"holds other features \(.*k: 3 is now 4"):
        kept(tmp_path, settings=FeatureSettings(["tdo", "transport"], k=4, max_tokens=64))
    other = tiny_model("llama", attention="sdpa")
    with torch.no_grad():
        other.get_output_embeddings().weight += 0.1
    with pytest.raises(ValueError, match=r"holds other features \(.*weights"):
        features_of(other, PROMPTS, ANSWERS, SETTINGS, folder=tmp_path, progress=False)
    (tmp_path / "features.json").write_text("{")
    with pytest.raises(ValueError, match=r"features\.json .* is damaged"):
        kept(tmp_path)
    (tmp_path / "features.json").unlink()
    with pytest.raises(ValueError, match=r"no features\.json that says whose"):
        kept(tmp_path)


def test_two_calls_do_not_write_to_one_folder(tmp_path):
    with filelock.FileLock(tmp_path / ".lock"), pytest.raises(RuntimeError, match="another call is writing"):
        kept(tmp_path)


# -- what cannot be read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "answers", "settings", "sentence"),
    [
        ([[5, 6]], [], {}, "0 answers for 1 prompts"),
        ([], [], {}, "0 answers for 0 prompts"),
        (["  "], ["w5"], {}, "the prompt of text 0 is blank"),
        (["w5"], [""], {}, "the answer of text 0 is blank"),
        ([[]], [[5]], {}, "the prompt of text 0 has no token"),
        ([[5, 6]], [[97]], {}, "token id 97, outside the model's vocabulary of 97"),
        ([[5, 6]], [[-1]], {}, "token id -1"),
        ([[5] * 3] * 2, [[5] * 9, [5] * 2], {"kinds": "laplacian", "k": 8}, "text 1 has 5 tokens .* need 8"),
        ([[5] * 60], [[5] * 20], {"max_tokens": 30}, "the answer of text 0 has 20 tokens and leaves no room"),
        ([[5] * 3], [[5] * 3], {"max_tokens": 500}, "max_tokens=500 and the model reads at most 128"),
        ([[5] * 3], [[5] * 3], {"heads": [(3, 0)]}, "head 0 of layer 3 .* heads 0 to 3 in the layers 0 to 2"),
        ([[5] * 3], [[5] * 3], {"heads": [(0, 4)]}, "head 4 of layer 0"),
    ],
)
def test_texts_that_cannot_be_read_are_told_before_any_is(prompts, answers, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        features_of(model(), prompts, answers, FeatureSettings(**{"max_tokens": 128, **settings}), progress=False)


def test_what_is_no_text():
    with pytest.raises(TypeError, match="prompts is a string"):
        features_of(model(), "w5", ["w6"], FeatureSettings(max_tokens=128))
    with pytest.raises(TypeError, match="the answer of text 0 must be a string or a list of token ids"):
        features_of(model(), ["w5"], [[1.5]], FeatureSettings(max_tokens=128))
    with pytest.raises(ValueError, match="has no tokenizer"):
        features_of(tiny_model("llama", attention="sdpa"), ["w5"], ["w6"], FeatureSettings(max_tokens=128))
    with pytest.raises(ValueError, match="batch_size=0"):
        features_of(model(), ["w5"], ["w6"], FeatureSettings(max_tokens=128), batch_size=0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kinds": "spectrum"}, "kinds='spectrum'"),
        ({"kinds": []}, "kinds="),
        ({"kinds": ["tdo", "tdo"]}, "each once"),
        ({"k": 0}, "k=0"),
        ({"max_tokens": 1}, "max_tokens=1"),
        ({"heads": "some"}, "heads='some'"),
        ({"heads": []}, "heads="),
        ({"heads": [3, 4]}, "heads="),
        ({"heads": [(1, 2), (1, 2)]}, "heads="),
        ({"heads": [(1, -2)]}, "heads="),
        ({"heads": [(1, 0.5)]}, "heads="),
    ],
)
def test_settings_are_checked(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FeatureSettings(**settings)
