"""AUROC and average precision: the pairs counted, scikit-learn's numbers, the forms over rows."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import average_precision_score, roc_auc_score

from attnprobe.metrics import auroc, average_precision
from attnprobe.metrics.discrimination import auroc_rows, average_precision_rows

ANSWERS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=2, max_size=25).filter(
    lambda answers: len({label for _, label in answers}) == 2
)


def columns(answers):
    return [np.array(column, dtype=float) for column in zip(*answers, strict=True)]


@settings(deadline=None)
@given(ANSWERS)
def test_auroc_is_the_share_of_pairs_in_order(answers):
    score, label = columns(answers)
    difference = score[label == 1][:, None] - score[label == 0]
    expected = ((difference > 0) + 0.5 * (difference == 0)).mean()
    assert auroc(score, label) == pytest.approx(expected, abs=1e-12)
    assert auroc_rows(score, label) == pytest.approx(expected, abs=1e-12)
    assert auroc(-score, label) == pytest.approx(1 - expected, abs=1e-12)
    assert auroc(np.exp(score), label) == auroc(score, label) == roc_auc_score(label, score)


@settings(deadline=None)
@given(ANSWERS)
def test_average_precision_is_scikit_learns(answers):
    score, label = columns(answers)
    expected = average_precision_score(label, score)
    assert average_precision(score, label) == pytest.approx(expected, abs=1e-12)
    assert average_precision_rows(score, label) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("metric", "rows"), [(auroc, auroc_rows), (average_precision, average_precision_rows)], ids=["auroc", "ap"]
)
class TestBoth:
    def test_rows(self, metric, rows):
        generator = np.random.default_rng(0)
        score, label = generator.integers(0, 4, (2, 3, 15)).astype(float), generator.integers(0, 2, (2, 3, 15)) * 1.0
        label[..., 0], label[..., 1] = 0, 1
        for i, j in np.ndindex(2, 3):
            assert rows(score, label)[i, j] == pytest.approx(metric(score[i, j], label[i, j]), abs=1e-12)
        label[0, 1] = 1
        label[1, 2] = 0
        assert np.isnan(rows(score, label)).tolist() == [[False, True, False], [False, False, True]]

    @pytest.mark.parametrize("label", [0, 1])
    def test_one_label_has_no_value(self, metric, rows, label):
        with pytest.warns(UndefinedMetricWarning, match=f"all labels are {label}"):
            assert math.isnan(metric([1, 2, 3], [label] * 3))

    def test_infinities_are_the_ends_of_the_order(self, metric, rows):
        label = [0, 1, 0, 1, 1]
        assert metric([-math.inf, 1, 2, math.inf, math.inf], label) == metric([0, 1, 2, 3, 3], label)

    @pytest.mark.parametrize(
        ("score", "label", "message"),
        [
            ([1, math.nan], [0, 1], "score is NaN at index 1"),
            ([1, 2], [0, math.nan], "label is NaN at index 1"),
            ([1, 2], [0.5, 1], "label is neither 0 nor 1 at index 0; cut graded values"),
            ([1, 2], [0, 1, 1], "different lengths"),
        ],
    )
    def test_bad_input_is_one_sentence(self, metric, rows, score, label, message):
        with pytest.raises(ValueError, match=message):
            metric(score, label)
