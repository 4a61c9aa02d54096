"""P-values on null data, power on planted effects, and what a study writes."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from polarity.labelled import features, pairs, reader, words
from scipy.stats import mannwhitneyu
from sklearn.metrics import roc_auc_score

from attnprobe.metrics import bootstrap, length_controlled_auroc
from attnprobe.metrics.discrimination import auroc
from attnprobe.polarity import (
    LabelledAnswer,
    Reversal,
    SourceSettings,
    StudySettings,
    polarity_of,
    polarity_study,
    study_of,
)
from attnprobe.polarity.features import QUANTITIES
from attnprobe.polarity.reversal import reversal_p
from attnprobe.polarity.study import one_sided

QUICK = StudySettings(resamples=40, permutations=499)
ROUGH = StudySettings(resamples=2, permutations=199)


def paired(seed, effect=0.0, n_questions=60, layers=4, heads=5, of_length=0.0, by_bin=0.0, name="made"):
    """Two answers a question: features share what the question brings, and differ by `effect` between labels.

    Hallucinated answers are longer by `of_length` tokens; features grow with the length by `by_bin` a token.
    """
    generator = np.random.default_rng(seed)
    group, label = np.repeat(np.arange(n_questions), 2), np.tile([0, 1], n_questions)
    tokens = np.round(10 + of_length * label + generator.integers(0, 4, len(label)))
    values = {}
    for quantity in QUANTITIES:
        noise = generator.normal(size=(len(label), layers, heads))
        question = generator.normal(size=(n_questions, layers, heads))[group]
        shift = (effect * label + by_bin * tokens)[:, None, None]
        values[quantity] = noise + question + shift
    return features(values, label, group, tokens, name)


def unpaired(seed, n=100, layers=4, heads=5):
    generator = np.random.default_rng(seed)
    values = {quantity: generator.normal(size=(n, layers, heads)) for quantity in QUANTITIES}
    return features(values, generator.permutation(np.arange(n) % 2), np.arange(n), generator.integers(1, 9, n))


def heads_of(found, kind):
    """p-values of single heads: independent of one another on made data."""
    return found.comparisons[kind].p_value[(found.names["level"] == "head").to_numpy()]


def share_below(p, at):
    """Share of p-values up to `at`, and how far it may be off by chance."""
    return (p <= at).mean(), 3.5 * np.sqrt(at * (1 - at) / len(p))


@pytest.mark.parametrize("at", [0.05, 0.2, 0.5, 0.8])
def test_p_values_are_uniform_without_an_effect(at):
    for found in (
        polarity_of(paired(1, layers=10, heads=10), QUICK),
        polarity_of(unpaired(2, layers=10, heads=10), QUICK),
    ):
        for kind in set(found.comparisons) - ({"length"} if "question" in found.comparisons else set()):
            share, slack = share_below(heads_of(found, kind), at)
            # p-values of within-question counts are coarse, so that fewer than `at` may lie below it
            assert at - slack - (0.1 if kind == "question" else 0.02) < share < at + slack + 0.01


def test_small_p_values_are_those_of_rank_sums():
    """Far out in the tail no permutation comes near; the normal limit of the rank sum says how far."""
    generator = np.random.default_rng(23)
    label = np.arange(200) % 2
    values = {q: generator.normal(size=(200, 5, 5)) + 0.7 * label[:, None, None] for q in QUANTITIES}
    found = polarity_of(features(values, label, np.arange(200), np.ones(200)), StudySettings(resamples=2))
    p = found.comparisons["plain"].p_value
    heads = (found.names["level"] == "head").to_numpy()
    first = found.names[heads & (found.names["quantity"] == "phi")].index
    for feature, x in zip(first, values["phi"].reshape(200, -1).T, strict=True):
        reference = mannwhitneyu(x[label == 1], x[label == 0], use_continuity=False, method="asymptotic").pvalue
        assert np.log10(p[feature]) == pytest.approx(np.log10(reference), abs=0.25)
    assert p[first].min() < 1e-5


def test_one_sided_counts_where_there_is_something_to_count():
    null = np.random.default_rng(24).normal(size=(999, 3))
    up, down = one_sided(np.array([1.0, 9.0, np.nan]), null)
    assert up[0] == (1 + (null[:, 0] >= 1).sum()) / 1000
    assert down[0] == (1 + (null[:, 0] <= 1).sum()) / 1000
    assert up[1] < 1e-12
    assert down[1] == 1.0
    assert np.isnan([up[2], down[2]]).all()
    same, _ = one_sided(np.array([0.5]), np.full((99, 1), 0.5))
    assert same[0] == 1.0


def test_length_alone_makes_no_length_controlled_effect():
    """Feature and label both hang on the length, and on nothing else: plain sees it, the bins of length do not."""
    generator = np.random.default_rng(3)
    tokens = generator.choice([2, 5, 9, 14, 20], 300)
    label = (generator.random(300) < tokens / 25).astype(int)
    values = {q: generator.normal(size=(300, 10, 10)) + 0.2 * tokens[:, None, None] for q in QUANTITIES}
    found = polarity_of(features(values, label, np.arange(300), tokens), QUICK)
    assert found.comparisons["plain"].length_auroc > 0.7
    assert found.comparisons["length"].length_auroc == 0.5
    assert (heads_of(found, "plain") < 0.01).mean() > 0.9
    for at in (0.05, 0.2, 0.5):
        share, slack = share_below(heads_of(found, "length"), at)
        assert at - slack - 0.02 < share < at + slack + 0.01


def test_answers_that_share_a_question_make_the_length_controlled_test_cautious():
    found = polarity_of(paired(4, layers=10, heads=10), QUICK)
    share, slack = share_below(heads_of(found, "length"), 0.1)
    assert share < 0.1 + slack


def test_false_discoveries_are_few():
    found = polarity_of(paired(5, layers=10, heads=10), QUICK)
    assert found.table["significant"].sum() <= 2


def test_planted_polarity_is_found_with_its_sign():
    for effect, sign in ((1.0, 1), (-1.0, -1)):
        table = polarity_of(paired(6, effect=effect), QUICK).table
        heads = table[table["level"] == "head"]
        right = heads["significant"] & (heads["polarity"] == sign)
        assert right[heads["kind"] != "length"].mean() > 0.95
        assert right[heads["kind"] == "length"].mean() > 0.6
        assert not (heads["significant"] & (heads["polarity"] == -sign)).any()


def test_aurocs_of_the_table_are_those_of_the_metrics():
    made = paired(7, effect=0.5, of_length=2)
    label, tokens = made.answers["label"].to_numpy(), made.answers["tokens"].to_numpy()
    table = polarity_of(made, QUICK).table.set_index(["kind", "level", "quantity", "layer", "head"]).sort_index()
    for layer, head in ((0, 0), (3, 4)):
        x = made.values["phi"][:, layer, head]
        assert table.loc[("plain", "head", "phi", layer, head), "auroc"] == pytest.approx(roc_auc_score(label, x))
        controlled = length_controlled_auroc(x, label, tokens)
        assert table.loc[("length", "head", "phi", layer, head), "auroc"] == pytest.approx(controlled.auroc)
        wins = np.mean(x[1::2] > x[::2])  # answers alternate: right, hallucinated
        assert table.loc[("question", "head", "phi", layer, head), "auroc"] == pytest.approx(wins)
    mean = made.values["curl"].mean((1, 2))
    response = table.xs(("plain", "response", "curl"), level=(0, 1, 2))
    assert response["auroc"].item() == pytest.approx(roc_auc_score(label, mean))
    below = (made.values["phi"] < 0.2).mean((1, 2))
    response = table.xs(("plain", "response", "below_floor"), level=(0, 1, 2))
    assert response["auroc"].item() == pytest.approx(roc_auc_score(label, below))


def test_intervals_are_about_those_of_the_bootstrap_and_cover():
    made = unpaired(8, n=200)
    found = polarity_of(made, StudySettings(resamples=800, permutations=9)).table
    one = found[(found["kind"] == "plain") & (found["level"] == "head") & (found["quantity"] == "phi")].iloc[0]
    reference = bootstrap(auroc, made.values["phi"][:, 0, 0], made.answers["label"].to_numpy(), resamples=800)
    assert one["low"] == pytest.approx(reference.low, abs=0.02)
    assert one["high"] == pytest.approx(reference.high, abs=0.02)
    heads = found[(found["level"] == "head") & (found["kind"] == "plain")]
    assert ((heads["low"] <= 0.5) & (heads["high"] >= 0.5)).mean() > 0.85


def test_intervals_of_paired_answers_know_of_questions():
    """A question's part of a feature cancels within questions, so that their interval is the narrower one."""
    found = polarity_of(paired(9, effect=1.0), QUICK).table
    width = (found["high"] - found["low"]).groupby([found["kind"], found["level"]]).mean()
    assert width["question", "head"] < 2 * width["plain", "head"]
    assert (found["low"] <= found["auroc"] + 1e-9).all()


def test_reversal_needs_both_effects():
    """One strong effect and one that is not there: as many reversals as the level allows, and no more."""
    strong, nothing = (polarity_of(paired(s, effect=e, layers=10, heads=10), QUICK) for s, e in ((10, 2.0), (11, 0.0)))
    heads = (strong.names["level"] == "head").to_numpy()
    for kind in ("plain", "question"):
        p = reversal_p(strong.comparisons[kind], nothing.comparisons[kind])[heads]
        for at in (0.05, 0.1):
            share, slack = share_below(p, at)
            assert share < at + slack
    p = reversal_p(
        nothing.comparisons["plain"], polarity_of(paired(12, layers=10, heads=10), QUICK).comparisons["plain"]
    )
    assert (p[heads] <= 0.05).mean() < 0.02


def test_planted_reversal_is_found_and_agreement_is_not_one():
    up, down, again = (
        polarity_of(paired(s, effect=e, layers=3, heads=4), QUICK) for s, e in ((13, 1.0), (14, -1.0), (15, 1.0))
    )
    opposed, agreeing = Reversal(up, down), Reversal(up, again)
    heads = opposed.table["level"] == "head"
    for kind in ("plain", "question"):
        of_kind = opposed.table["kind"] == kind
        assert opposed.table.loc[heads & of_kind, "reversed"].mean() > 0.95
    assert not agreeing.table["reversed"].any()
    assert (opposed.profiles["cosine"] < -0.9).all()
    assert (opposed.profiles["p_reversal_adjusted"] < 0.05).all()
    assert (opposed.profiles["opposite"] > 0).all()
    assert (opposed.profiles["p_opposite"] <= 0.01).all()
    assert (agreeing.profiles["cosine"] > 0.9).all()
    assert (agreeing.profiles["p_reversal"] > 0.9).all()
    assert (agreeing.profiles["p_agreement"] <= 0.01).all()


def test_profiles_of_nothing_reverse_as_often_as_chance():
    p = []
    for seed in range(40):
        one, two = (polarity_of(paired(100 + 2 * seed + k, n_questions=20, layers=2, heads=3), ROUGH) for k in (0, 1))
        p += list(Reversal(one, two).profiles.query("kind != 'length'")["p_reversal"])
    share, slack = share_below(np.array(p[::2]), 0.1)
    assert share < 0.1 + slack
    assert np.mean(p) > 0.4


def test_length_that_reverses_alone_reverses_plain_and_not_length_controlled():
    """Features count tokens. Hallucinated answers are longer in one data set and shorter in the other."""
    one, two = (
        polarity_of(
            paired(s, of_length=d, by_bin=2.0, layers=3, heads=4),
            StudySettings(bins=12, resamples=40, permutations=999),
        )
        for s, d in ((20, 2), (21, -2))
    )
    table = Reversal(one, two).table.query("level == 'head'")
    assert table.query("kind == 'plain'")["reversed"].mean() > 0.9
    assert table.query("kind == 'length'")["reversed"].mean() < 0.05


def test_one_label_or_one_question_is_refused():
    made = unpaired(16)
    with pytest.raises(ValueError, match="have the label 0"):
        polarity_of(features(made.values, np.zeros(100), np.arange(100), np.ones(100)), ROUGH)
    with pytest.raises(ValueError, match="belong to one question"):
        polarity_of(features(made.values, np.arange(100) % 2, np.zeros(100), np.ones(100)), ROUGH)


def test_two_models_are_not_compared():
    one, two = (polarity_of(unpaired(17, layers=n), ROUGH) for n in (2, 3))
    with pytest.raises(ValueError, match="different layers or heads"):
        Reversal(one, two)


def test_without_length_pairs_there_is_nothing_to_say():
    """Every right answer is short and every hallucinated one long."""
    made = paired(18, of_length=100)
    study = study_of([made, made], QUICK)
    table = study.table
    assert table.loc[table["kind"] == "length", "auroc"].isna().all()
    assert not table.loc[table["kind"] == "length", "significant"].any()
    assert study.summary()["data"][0]["pairs"]["length"] == 0
    assert any("no pairs" in section.frame.to_string() for section in study.sections())


def test_a_study_of_two_data_sets_and_what_it_writes(tmp_path):
    answers = [*pairs(6), LabelledAnswer("long:0", "long", words(60), "a cat", 0)]
    rows = [{"id": a.id, "group": a.group, "prompt": a.prompt, "answer": a.answer, "label": a.label} for a in answers]
    for name, flip in (("one", 0), ("two", 1)):
        said = "".join(json.dumps({**row, "label": abs(row["label"] - flip)}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(said, encoding="utf-8")
    data = [SourceSettings(data=str(tmp_path / f"{name}.jsonl")) for name in ("one", "two")]
    out = tmp_path / "out"
    study = polarity_study(reader(), data, out=out, max_tokens=40, settings=QUICK, progress=False)
    assert sorted(path.name for path in out.iterdir()) == [
        "one", "polarity.csv", "profiles.csv", "reversal.csv", "summary.json", "two",
    ]  # fmt: skip
    said = json.loads((out / "summary.json").read_text())
    assert said == json.loads(json.dumps(study.summary()))
    assert [d["truncated"] for d in said["data"]] == [1, 1]
    assert said["settings"]["max_tokens"] == 40
    assert "loses the middle" in said["truncation"]
    assert "one: 1 of 13 answers were read after a cut prompt." in study.notices
    table = pd.read_csv(out / "polarity.csv")
    assert len(table) == len(study.table) == 2 * 3 * (6 + 6 * 3 + 5 * 12)
    # The labels of the second are those of the first turned round.
    both = pd.read_csv(out / "reversal.csv").query("kind == 'plain'")
    np.testing.assert_allclose(both["auroc_1"], 1 - both["auroc_2"])


def test_questions_of_one_label_are_said():
    made = unpaired(22)
    label = np.repeat(np.arange(50) % 2, 2)
    study = study_of([features(made.values, label, np.repeat(np.arange(50), 2), made.answers["tokens"])], ROUGH)
    assert "50 questions have several answers of one label" in study.notices[0]
    assert study_of([made], ROUGH).notices == ()


def test_the_same_seed_gives_the_same_study():
    one, two, other = (
        polarity_of(paired(19), StudySettings(resamples=20, permutations=99, seed=seed)).table for seed in (0, 0, 1)
    )
    pd.testing.assert_frame_equal(one, two)
    assert not one["p"].equals(other["p"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bins": 0}, "bins is 0"),
        ({"permutations": 0}, "permutations is 0"),
        ({"resamples": 0}, "resamples is 0"),
        ({"level": 1.0}, "level is 1.0"),
        ({"alpha": 0.0}, "alpha is 0.0"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        StudySettings(**settings)
