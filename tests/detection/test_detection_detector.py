"""A detector: what it says, on disk and back, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import zipfile

import numpy as np
import pytest
import torch
from detection.made import MODEL, features, model, token_ids, told
from tiny import tiny_model

from attnprobe import detection, metrics
from attnprobe.detection import Detector, FeatureSettings, features_of
from attnprobe.detection.array_file import read_arrays, write_arrays

SETTINGS = FeatureSettings(["tdo", "transport"], k=4, max_tokens=64)


@pytest.fixture(scope="module")
def fitted():
    """A detector of the tiny model: wrong answers are long."""
    prompts = token_ids(*[12, 13, 11, 14] * 6, seed=1)
    answers = token_ids(*[2, 30] * 12, seed=2)
    found = features_of(model(), prompts, answers, SETTINGS, progress=False)
    return Detector.fit(found, np.arange(24) % 2, groups=np.arange(24) // 2), found, prompts, answers


def test_a_file_gives_back_the_same_detector_to_the_last_bit(fitted, tmp_path):
    detector, found, *_ = fitted
    path = tmp_path / "a detector"
    detector.save(path)
    loaded = Detector.load(path)
    assert loaded.probability(found).tolist() == detector.probability(found).tolist()
    for field in dataclasses.fields(Detector):
        if field.name not in ("linear", "settings"):
            assert getattr(loaded, field.name) == getattr(detector, field.name), field.name
    assert loaded.columns == detector.columns
    assert repr(loaded) == repr(detector)
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_arrays_and_json(fitted, tmp_path):
    fitted[0].save(tmp_path / "d.npz")
    with np.load(tmp_path / "d.npz", allow_pickle=False) as arrays:
        assert sorted(arrays.files) == ["heads", "mean", "said", "weights"]
        assert all(arrays[name].dtype != object for name in arrays.files)
        said = json.loads(str(arrays["said"]))
    assert said["format"] == 1
    assert said["label"] == detection.LABEL
    assert said["settings"]["kinds"] == ["tdo", "transport"]


def test_one_call_says_how_likely_an_answer_is_wrong(fitted, tmp_path):
    detector, found, prompts, answers = fitted
    detector.save(tmp_path / "d.npz")
    loaded = Detector.load(tmp_path / "d.npz")
    said = [loaded.predict(model(), prompt, answer) for prompt, answer in zip(prompts[:6], answers[:6], strict=True)]
    assert said == pytest.approx(detector.probability(found)[:6].tolist(), abs=1e-5)
    on_the_bridge = loaded.predict(model("bridge"), prompts[0], answers[0])
    assert on_the_bridge == pytest.approx(said[0], abs=1e-4)
    assert loaded.predict(model(), "w5 w6 w7", "w8") == loaded.predict(model(), [5, 6, 7], [8])


def test_what_it_learnt_is_there_in_new_texts(fitted):
    detector = fitted[0]
    assert (detector.evaluation.train, detector.evaluation.test) == (18, 6)
    assert detector.texts == 24
    assert detector.longest == 44
    prompts = token_ids(*[11, 12, 14] * 4, seed=7)
    answers = token_ids(*[2, 30] * 6, seed=8)
    said = detector.probability(features_of(model(), prompts, answers, SETTINGS, progress=False))
    assert metrics.auroc(said, np.arange(12) % 2) > 0.9
    assert ((said >= 0) & (said <= 1)).all()


def test_weights_are_named(fitted):
    table = fitted[0].weights()
    assert list(table) == ["kind", "variable", "layer", "head", "weight"]
    assert len(table) == 12 * (4 + 3)
    row = table[(table.variable == "phi") & (table.layer == 2) & (table["head"] == 1)]
    place = fitted[0].columns.index(("transport", "phi", 2, 1))
    assert row["weight"].item() == fitted[0].linear.weights[place]


def test_fit_measures_on_what_it_holds_out_and_then_uses_all():
    made, labels, groups = told(100)
    detector = Detector.fit(made, labels, groups=groups, seed=3)
    assert detector.evaluation == detection.evaluate(made, labels, groups, seed=3)
    whole = Detector.fit(made, labels, test_share=0)
    assert whole.evaluation is None
    assert whole.probability(made).tolist() == detector.probability(made).tolist()
    assert "AUROC" in repr(detector)
    assert "AUROC" not in repr(whole)


def test_a_prompt_that_is_cut_is_told(fitted):
    with pytest.warns(UserWarning, match="max_tokens=64: 20 tokens were taken out"):
        fitted[0].predict(model(), [5] * 80, [6] * 4)


def test_another_model_is_refused(fitted):
    detector = fitted[0]
    other = tiny_model("llama", attention="sdpa")
    with torch.no_grad():
        other.get_output_embeddings().weight *= 1.01
    with pytest.raises(ValueError, match="same size with other weights"):
        detector.predict(other, [5, 6], [7])
    deeper = tiny_model("llama", attention="sdpa", num_hidden_layers=4)
    with pytest.raises(ValueError, match="3 layers and this one has 4"):
        detector.predict(deeper, [5, 6], [7])


def test_other_features_are_refused():
    made, labels, _ = told(20)
    detector = Detector.fit(made, labels, test_share=0)
    with pytest.raises(ValueError, match=r"transport \(k=16\) of 2 heads, and these .* of 3 heads"):
        detector.probability(features(np.zeros((4, 9))))
    elsewhere = dataclasses.replace(made, model=dataclasses.replace(MODEL, n_heads=5))
    with pytest.raises(ValueError, match="4 heads a layer and this one has 5"):
        detector.probability(elsewhere)


def test_every_flipped_bit_is_noticed(tmp_path):
    made, labels, _ = told(20)
    path = tmp_path / "d.npz"
    detector = Detector.fit(made, labels, test_share=0)
    detector.save(path)
    data = path.read_bytes()
    expected = detector.probability(made).tolist()
    noticed = 0
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        try:
            found = Detector.load(path).probability(made).tolist()
        except ValueError:
            noticed += 1
        else:  # a byte of the archive that says nothing about the arrays, such as a date
            assert found == expected
    assert noticed > 0.7 * len(data) / 7
    for length in (0, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"d\.npz is damaged"):
            Detector.load(path)


def test_files_that_are_no_detector(tmp_path):
    made, labels, _ = told(20)
    path = tmp_path / "d.npz"
    Detector.fit(made, labels, test_share=0).save(path)
    arrays, said = read_arrays(path)
    with pytest.raises(FileNotFoundError):
        Detector.load(tmp_path / "nothing.npz")
    cases = [
        (arrays, {**said, "what": "something"}, "is no detector"),
        (arrays, {**said, "format": 2}, "format 2, and this version of attnprobe reads 1"),
        ({**arrays, "weights": arrays["weights"][:-1]}, said, "weights should be 6 finite numbers"),
        ({**arrays, "mean": arrays["mean"] * np.nan}, said, "mean should be 6 finite numbers"),
        ({**arrays, "heads": arrays["heads"][:1]}, said, "should be 3 finite numbers"),
        ({"mean": arrays["mean"]}, said, "damaged"),
        (arrays, {**said, "settings": {"kinds": ["x"]}}, "damaged"),
        (arrays, {**said, "model": {"layers": 2}}, "damaged"),
    ]
    for some, what, sentence in cases:
        write_arrays(path, some, what)
        with pytest.raises(ValueError, match=sentence):
            Detector.load(path)
    np.savez(path, weights=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="damaged, or is no file of arrays"):
        Detector.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("said.npy", b"text")
    with pytest.raises(ValueError, match="damaged, or is no file of arrays"):
        Detector.load(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    made, labels, _ = told(20)
    path = tmp_path / "d.npz"
    Detector.fit(made, labels, test_share=0).save(path)
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        Detector.fit(made, labels, test_share=0).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
