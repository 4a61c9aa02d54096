"""PRR: LM-Polygraph's numbers, the definition written out, theorems."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.exceptions import UndefinedMetricWarning

from attnprobe.metrics import prediction_rejection_ratio, rejection_curve
from attnprobe.metrics.rejection import ratio_rows

GOLDEN = json.loads((Path(__file__).parent / "golden_prr.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}
REJECTIONS = {"prr": 1.0, "prr_0.5": 0.5}

# Where LM-Polygraph and the definition part, on purpose:
# - equal uncertainties: it takes the order an unstable sort leaves, we the expectation over all orders;
# - NaN uncertainty: it makes the answer the most certain of all, we refuse;
# - constant quality, or a single point of the curve: it returns the raw score, where 0/0 is no ratio.
TIED = {("ties_uncertainty_n10", "prr"), ("ties_uncertainty_n10", "prr_0.5"), ("nan_inf_uncertainty_n15", "prr")}
UNDEFINED = {("n2", "prr_0.5"), ("n1", "prr"), ("n1", "prr_0.5")}
CONSTANT = {("constant_quality_n12", "prr"), ("constant_quality_n12", "prr_0.5")}
COMPARABLE = sorted(set(itertools.product(CASES, REJECTIONS)) - TIED - UNDEFINED - CONSTANT)

SMALL = st.integers(0, 3)
QUALITY = st.floats(-10, 10, allow_subnormal=False)


def golden(name):
    case = CASES[name]
    uncertainty = case.get("uncertainty_as_evaluated", case["uncertainty"])
    return [float(value) for value in uncertainty], [float(value) for value in case["quality"]]


def ratio(raw, random, oracle):
    return (raw - random) / (oracle - random)


def raw_score(quality_in_order, max_rejection):
    """S of one order, with loops."""
    n = len(quality_in_order)
    points = int(max_rejection * n)
    return sum(sum(quality_in_order[:k]) / k for k in range(n - points + 1, n + 1)) / points


def mean_over_orders(uncertainty, quality, max_rejection):
    """The raw score averaged over all permutations of the answers that sort the uncertainty."""
    n = len(quality)
    orders = [
        order
        for order in itertools.permutations(range(n))
        if all(uncertainty[i] <= uncertainty[j] for i, j in itertools.pairwise(order))
    ]
    return sum(raw_score([quality[i] for i in order], max_rejection) for order in orders) / len(orders)


def written_out(uncertainty, quality, max_rejection):
    raw = mean_over_orders(uncertainty, quality, max_rejection)
    random = mean_over_orders([0] * len(quality), quality, max_rejection)
    return ratio(raw, random, raw_score(sorted(quality, reverse=True), max_rejection))


@pytest.mark.parametrize(("name", "key"), COMPARABLE)
def test_lm_polygraph(name, key):
    uncertainty, quality = golden(name)
    expected = CASES[name][key]
    found = prediction_rejection_ratio(uncertainty, quality, REJECTIONS[key])
    assert found == pytest.approx(
        ratio(expected["raw"], expected["random_exact_expectation"], expected["oracle"]), abs=1e-9
    )
    # The curve has its raw areas, in units of the min-max quality.
    curve = rejection_curve(uncertainty, quality, REJECTIONS[key])
    low, span = min(quality), max(quality) - min(quality)
    for field, raw in (("quality", "raw"), ("oracle", "oracle"), ("random", "random_exact_expectation")):
        assert (getattr(curve, field).mean() - low) / span == pytest.approx(expected[raw], abs=1e-9)


@pytest.mark.parametrize(("name", "key"), sorted(TIED))
def test_ties_are_the_mean_of_lm_polygraphs_tie_orders(name, key):
    expected = CASES[name][key]
    orders = expected["raw_over_2000_random_tie_orders"]
    low, high = (ratio(orders[end], expected["random_exact_expectation"], expected["oracle"]) for end in ("min", "max"))
    mean = ratio(orders["mean"], expected["random_exact_expectation"], expected["oracle"])
    found = prediction_rejection_ratio(*golden(name), REJECTIONS[key])
    # A mean of 2000 orders within this range is off by (high - low) / 2 / sqrt(2000) at most, as one standard error.
    assert found == pytest.approx(mean, abs=4 * (high - low) / 2 / math.sqrt(2000))


@pytest.mark.parametrize(("name", "key"), sorted(CONSTANT))
def test_constant_quality_has_no_ratio(name, key):
    with pytest.warns(UndefinedMetricWarning, match="same quality"):
        assert math.isnan(prediction_rejection_ratio(*golden(name), REJECTIONS[key]))


@pytest.mark.parametrize(("name", "key"), sorted(UNDEFINED))
def test_too_few_answers(name, key):
    with pytest.raises(ValueError, match="too few to reject"):
        prediction_rejection_ratio(*golden(name), REJECTIONS[key])


def test_nan_is_refused_and_infinities_are_the_ends():
    case = CASES["nan_inf_uncertainty_n15"]
    uncertainty, quality = np.array([float(value) for value in case["uncertainty"]]), np.array(case["quality"])
    with pytest.raises(ValueError, match=r"uncertainty is NaN at index 2;"):
        prediction_rejection_ratio(uncertainty, quality)
    keep = ~np.isnan(uncertainty)
    finite = np.clip(uncertainty[keep], -1e7, 1e7)
    assert prediction_rejection_ratio(uncertainty[keep], quality[keep]) == prediction_rejection_ratio(
        finite, quality[keep]
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(SMALL, QUALITY), min_size=2, max_size=6), st.sampled_from([0.4, 0.5, 0.8, 1.0]))
def test_the_definition_written_out(answers, max_rejection):
    uncertainty, quality = zip(*answers, strict=True)
    assume(int(max_rejection * len(answers)) >= 2 and max(quality) - min(quality) > 1e-3)
    found = prediction_rejection_ratio(uncertainty, quality, max_rejection)
    assert found == pytest.approx(written_out(uncertainty, quality, max_rejection), abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.tuples(SMALL, QUALITY), min_size=4, max_size=30))
def test_the_ratio_is_the_area_of_the_curves(answers):
    uncertainty, quality = zip(*answers, strict=True)
    assume(max(quality) - min(quality) > 1e-3)
    curve = rejection_curve(uncertainty, quality)
    area = (curve.quality - curve.random).mean() / (curve.oracle - curve.random).mean()
    assert prediction_rejection_ratio(uncertainty, quality) == pytest.approx(area, abs=1e-9)
    assert curve.rejected.tolist() == [k / len(answers) for k in range(len(answers) // 2)]
    assert curve.quality[0] == pytest.approx(np.mean(quality))
    assert (np.diff(curve.oracle) >= -1e-9).all()


@settings(deadline=None)
@given(st.lists(QUALITY, min_size=4, max_size=30), st.randoms(use_true_random=False))
def test_the_oracle_has_one_and_the_reverse_is_the_least(quality, random):
    quality = np.array(quality)
    assume(np.ptp(quality) > 1e-3)
    anything = np.array([random.random() for _ in quality])
    least = prediction_rejection_ratio(quality, quality)
    assert prediction_rejection_ratio(-quality, quality) == pytest.approx(1, abs=1e-12)
    assert least < 0
    assert least - 1e-12 <= prediction_rejection_ratio(anything, quality) <= 1 + 1e-12


@settings(deadline=None)
@given(
    st.lists(st.tuples(SMALL, QUALITY), min_size=4, max_size=20),
    st.sampled_from([np.exp, np.arctan, lambda u: u**3, lambda u: 7 * u - 100]),
    st.floats(0.1, 50),
    st.floats(-50, 50),
)
def test_monotone_and_affine_maps_change_nothing(answers, monotone, scale, shift):
    uncertainty, quality = (np.array(column, dtype=float) for column in zip(*answers, strict=True))
    assume(np.ptp(quality) > 1e-3)
    expected = prediction_rejection_ratio(uncertainty, quality)
    assert prediction_rejection_ratio(monotone(uncertainty), quality) == expected
    assert prediction_rejection_ratio(uncertainty, scale * quality + shift) == pytest.approx(expected, abs=1e-8)


@settings(deadline=None)
@given(st.lists(st.tuples(SMALL, QUALITY), min_size=4, max_size=20), st.randoms(use_true_random=False))
def test_the_order_of_the_answers_does_not_matter(answers, random):
    assume(max(quality for _, quality in answers) - min(quality for _, quality in answers) > 1e-3)
    shuffled = random.sample(answers, len(answers))
    first, second = (prediction_rejection_ratio(*zip(*one, strict=True)) for one in (answers, shuffled))
    assert first == pytest.approx(second, abs=1e-9)


@pytest.mark.parametrize("max_rejection", [0.5, 1.0])
def test_random_order_has_zero(max_rejection):
    quality = [0.1, 0.7, 0.2, 0.9, 0.4]
    ratios = [prediction_rejection_ratio(order, quality, max_rejection) for order in itertools.permutations(range(5))]
    assert np.mean(ratios) == pytest.approx(0, abs=1e-12)
    assert prediction_rejection_ratio([3] * 5, quality, max_rejection) == pytest.approx(0, abs=1e-12)


def test_one_good_answer_in_closed_form():
    # With every rejection, place i of n has the weight (H_n - H_{i-1}) / n.
    n = 12
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, n + 1))])
    weight = (harmonic[n] - harmonic[:n]) / n
    for place in range(n):
        quality = np.zeros(n)
        quality[place] = 1
        expected = (weight[place] - 1 / n) / (weight[0] - 1 / n)
        assert prediction_rejection_ratio(np.arange(n), quality, 1.0) == pytest.approx(expected, abs=1e-12)
    # Minus one is no bound: weights 7, 7, 7 and 3 of 24 for four answers, half of which may be rejected.
    assert prediction_rejection_ratio([1, 2, 3, 4], [0, 0, 0, 1]) == pytest.approx(-3, abs=1e-12)


def test_rows_are_the_metric_of_each_row():
    generator = np.random.default_rng(0)
    uncertainty, quality = generator.integers(0, 4, (3, 4, 9)).astype(float), generator.random((3, 4, 9))
    rows = ratio_rows(uncertainty, quality)
    assert rows.shape == (3, 4)
    for i, j in np.ndindex(3, 4):
        assert rows[i, j] == prediction_rejection_ratio(uncertainty[i, j], quality[i, j])
    quality[1, 2] = 0.5
    assert np.isnan(ratio_rows(uncertainty, quality)).sum() == 1
    assert np.isnan(ratio_rows(uncertainty[..., :3], quality[..., :3])).all()


def test_everything_that_holds_numbers_is_taken():
    uncertainty, quality = [0.5, 0.25, 1.0, 2.0], [1, 0, 1, 0]
    expected = prediction_rejection_ratio(uncertainty, quality)
    index = [7, 5, 3, 1]
    assert prediction_rejection_ratio(pd.Series(uncertainty, index=index), pd.Series(quality)) == expected
    assert prediction_rejection_ratio(pd.Series(uncertainty, dtype="Float64"), np.array(quality, bool)) == expected
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.tensor(uncertainty, dtype=dtype, requires_grad=True)
        assert prediction_rejection_ratio(tensor, torch.tensor(quality)) == expected


def test_huge_and_tiny_qualities():
    assert prediction_rejection_ratio([1, 2, 3, 4], [1e308, 1e308, -1e308, -1e308]) == 1
    assert prediction_rejection_ratio([4, 3, 2, 1], [1e-300, 1e-300, 0, 0]) == pytest.approx(-1)


@pytest.mark.parametrize(
    ("uncertainty", "quality", "max_rejection", "message"),
    [
        ([1, 2, 3, 4], [1, 2, math.nan, 4], 0.5, "quality is NaN at index 2; leave that answer out"),
        ([1, 2, 3, None], [1, 2, 3, 4], 0.5, "uncertainty is NaN at index 3"),
        ([1, 2, 3, 4], [1, 2, 3, math.inf], 0.5, "quality is infinite at index 3"),
        ([1, 2, 3], [1, 2, 3, 4], 0.5, r"different lengths \(uncertainty 3, quality 4\)"),
        ([[1, 2], [3, 4]], [1, 2, 3, 4], 0.5, r"uncertainty has shape \(2, 2\)"),
        ([], [], 0.5, "uncertainty is empty"),
        (["1", "2", "3", "4"], [1, 2, 3, 4], 0.5, "uncertainty holds <U1 entries"),
        ([1, 2, 3, 4], [1, 2, 3, 4], 0.0, "max_rejection is 0.0"),
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.5, "max_rejection is 1.5"),
        ([1, 2, 3, 4], [1, 2, 3, 4], math.nan, "max_rejection is nan"),
        ([1, 2, 3], [1, 2, 3], 0.5, "3 answers are too few .* give at least 4"),
    ],
)
def test_bad_input_is_one_sentence(uncertainty, quality, max_rejection, message):
    with pytest.raises(ValueError, match=message):
        prediction_rejection_ratio(uncertainty, quality, max_rejection)


def test_a_curve_needs_a_point():
    with pytest.raises(ValueError, match="no point for 1 answers"):
        rejection_curve([1], [1])
    assert rejection_curve([1, 2], [0, 1]).quality.tolist() == [0.5]
