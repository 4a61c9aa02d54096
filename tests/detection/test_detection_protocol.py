"""Splits, the linear function, and what AUROC is measured on."""

from __future__ import annotations

import numpy as np
import pytest
from detection.made import features, told
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from attnprobe import metrics
from attnprobe.detection import evaluate, grouped_auroc, out_of_fold
from attnprobe.detection.linear import fit_linear
from attnprobe.detection.splits import folds, group_numbers, held_out


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=12, max_size=40), seed=st.integers(0, 99), n_folds=st.integers(2, 4))
def test_groups_stay_whole_and_every_text_is_tested_once(sizes, seed, n_folds):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    labels = np.arange(len(groups)) % 2
    parts = folds(labels, groups, n_folds, seed)
    assert (np.sum(parts, 0) == 1).all()
    for part in parts:
        assert not set(groups[part]) & set(groups[~part])
        assert 0 < labels[part].mean() < 1


def test_two_answers_a_question_split_evenly_by_seed():
    labels, groups = np.arange(100) % 2, np.arange(100) // 2
    test = held_out(labels, groups, 0.2, seed=0)
    assert test.sum() == 20
    assert labels[test].mean() == 0.5
    assert (test == held_out(labels, groups, 0.2, seed=0)).all()
    assert (test != held_out(labels, groups, 0.2, seed=1)).any()


def test_without_groups_the_split_is_stratified():
    labels = np.array([1] * 10 + [0] * 90)
    for seed in range(5):
        assert labels[held_out(labels, group_numbers(None, 100), 0.2, seed)].sum() == 2


def test_groups_of_any_kind_are_numbered():
    assert group_numbers([("a", 1), "b", ("a", 1)], 3).tolist() == [0, 1, 0]
    assert group_numbers(np.array(["x", "y", "x"]), 3).tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="2 groups for 3 texts"):
        group_numbers(["a", "b"], 3)


def test_splits_that_cannot_be_made():
    with pytest.raises(ValueError, match="2 groups for 5 folds"):
        held_out(np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]), 0.2, seed=0)
    with pytest.raises(ValueError, match="both labels in each"):
        folds(np.array([1] + [0] * 19), np.arange(20), 5, seed=0)
    for share in (0, -0.1, 0.6, 1):
        with pytest.raises(ValueError, match="cannot be held out"):
            held_out(np.arange(20) % 2, np.arange(20), share, seed=0)
    with pytest.raises(ValueError, match="1 folds"):
        folds(np.arange(20) % 2, np.arange(20), 1, seed=0)


@pytest.mark.parametrize(("texts", "number", "most"), [(60, 9, 512), (30, 90, 512), (60, 30, 5)])
def test_one_linear_function_is_the_pipeline_of_scikit_learn(texts, number, most):
    made, labels, _ = told(texts, number)
    labels = labels * (np.arange(texts) % 3 > 0)  # unbalanced
    fitted = fit_linear(made.values, labels, most)
    components = min(most, texts - 1, number)
    assert fitted.components == components
    pipeline = make_pipeline(
        PCA(components, svd_solver="full"), LogisticRegression(class_weight="balanced", max_iter=2000)
    )
    expected = pipeline.fit(made.values.astype(float), labels).decision_function(made.values.astype(float))
    np.testing.assert_allclose(fitted.log_odds(made.values), expected, rtol=1e-9, atol=1e-9)


def test_log_odds_do_not_depend_on_what_else_is_asked():
    made, labels, _ = told(50, 90)
    fitted = fit_linear(made.values, labels)
    one_by_one = [float(fitted.log_odds(made.values[i : i + 1])[0]) for i in range(50)]
    assert one_by_one == fitted.log_odds(made.values).tolist()


def test_features_that_tell_are_found_and_others_are_at_chance():
    made, labels, groups = told(200, strength=2.0)
    found = evaluate(made, labels, groups, resamples=300)
    assert (found.train, found.test, found.components) == (160, 40, 6)
    assert found.auroc.estimate > 0.95
    assert found.auroc.low > 0.85
    noise, labels, groups = told(400, strength=0.0)
    chance = grouped_auroc(out_of_fold(noise, labels, groups), labels, groups, resamples=300)
    assert chance.low < 0.5 < chance.high


def test_the_held_out_auroc_is_of_texts_that_the_fit_has_not_seen():
    made, labels, groups = told(100, number=60, strength=0.3)
    test = held_out(labels, groups, 0.2, seed=4)
    fitted = fit_linear(made.values[~test], labels[~test])
    expected = metrics.auroc(fitted.log_odds(made.values[test]), labels[test])
    assert evaluate(made, labels, groups, seed=4, resamples=50).auroc.estimate == pytest.approx(expected)
    # 60 features separate 80 texts, whatever the label
    assert metrics.auroc(fit_linear(made.values, labels).log_odds(made.values), labels) > 0.95 > expected


def test_a_question_on_both_sides_would_be_recognised():
    # features that know the question, and labels that go by it, and nothing else to learn
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 4)
    values = np.repeat(generator.normal(size=(40, 60)), 4, axis=0) + 0.01 * generator.normal(size=(160, 60))
    labels = np.repeat(generator.integers(0, 2, 40), 4)
    made = features(values)
    leaking = metrics.auroc(out_of_fold(made, labels), labels)
    honest = metrics.auroc(out_of_fold(made, labels, groups), labels)
    assert leaking > 0.95
    assert honest < 0.7


def test_every_text_has_a_score_of_another_fold():
    made, labels, groups = told(60)
    score = out_of_fold(made, labels, groups, n_folds=3, seed=2)
    for test in folds(labels, groups, 3, 2):
        expected = fit_linear(made.values[~test], labels[~test]).log_odds(made.values[test])
        np.testing.assert_array_equal(score[test], expected)


def test_repeated_answers_do_not_narrow_an_interval():
    generator = np.random.default_rng(1)
    score, label = generator.normal(size=40), np.arange(40) % 2
    once = grouped_auroc(score, label, seed=3, resamples=500)
    four = grouped_auroc(np.repeat(score, 4), np.repeat(label, 4), np.repeat(np.arange(40), 4), seed=3, resamples=500)
    assert four == once
    assert once.estimate == pytest.approx(metrics.auroc(score, label), abs=1e-12)
    apart = grouped_auroc(np.repeat(score, 4), np.repeat(label, 4), seed=3, resamples=500)
    assert apart.high - apart.low < 0.7 * (once.high - once.low)


def test_labels_are_checked():
    made, labels, groups = told(20)
    for wrong, sentence in (
        (labels[:-1], "19 labels for 20 texts"),
        (labels + 1, "neither 0 nor 1"),
        (np.zeros(20), "all labels are 0"),
        (np.where(labels, np.nan, 0.0), "NaN"),
    ):
        with pytest.raises(ValueError, match=sentence):
            evaluate(made, wrong, groups)
    with pytest.raises(ValueError, match="3 groups for 20 texts"):
        evaluate(made, labels, [1, 2, 3])
    with pytest.raises(ValueError, match="NaN at index 1"):
        grouped_auroc([1.0, np.nan], [0, 1])
