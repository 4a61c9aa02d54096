"""Semantic entropy and LUQ: the arithmetic, against LM-Polygraph's numbers and the definitions written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from uncertainty.sampled import FixedNLI, RuleNLI

import attnprobe as ap
from attnprobe.functional import luq, semantic_classes, semantic_entropy
from attnprobe.uncertainty import Sample, SampledMethod, Samples
from attnprobe.uncertainty.semantic import first_of_each

# Computed by LM-Polygraph 0.7.0: SemanticClassesCalculator, SemanticEntropy and LUQ on random inputs; label 2 is
# entailment.
# fmt: off
GOLDEN = [
    {
        "texts": ["t1", "t3", "t0", "t0", "t0"],
        "log_probability": [
            -0.6092790803445216, -3.627262727575402, -7.9669235354964, -3.697372718842546, -7.0030953146231845,
        ],
        "label": [[2, 1, 0, 1, 2], [1, 2, 1, 1, 2], [2, 0, 2, 2, 2], [1, 2, 2, 2, 2], [2, 1, 2, 2, 2]],
        "entailment": [
            [
                0.78073101823722, 1.0965759940447497, -2.7373739587602994, -3.471134412340845, -2.0027130974837113,
            ],
            [
                1.8632507733049104, 0.20556750751485114, 3.215817493312066, -1.0418852296915673, -1.7191443527591956,
            ],
            [
                -1.9219605938866249, -2.4032591340144425, 4.338852127300517, -3.897939874945353, 1.2804094740379395,
            ],
            [
                -1.2066716328736142, 1.435186392785584, 0.9314091723467997, 1.4354329457725505, -2.9062286117598646,
            ],
            [
                -2.3416626600386246, 3.1603810142974726, 2.5414541548664555, -0.7345645647033802, 1.7194980581165185,
            ],
        ],
        "contradiction": [
            [
                -1.714132547935361, 1.0437059546629723, 0.6722371743948005, -0.6162313399066678, -2.675367808327494,
            ],
            [
                -3.0334533302481055, 0.2381146652051335, -0.8142719097246358, 0.7570711748058118, -0.646678912106709,
            ],
            [
                -0.8803834443065242, -2.2501930200896716, 2.3399825349664978, -3.8992930465870197, 6.223902000329999,
            ],
            [
                2.3837774317731917, 1.5210915501578701, 0.08172091553714202, -1.5329083771376006, -1.3317790092245203,
            ],
            [
                -1.1472958888401878, 1.8486453454028422, 1.0875027072742147, 0.45022088154242146, 0.02104568086557902,
            ],
        ],
        "members": [[0, 4], [1], [2, 3]],
        "entropy": 2.441888624145531,
        "direct": 0.9434859495517561,
        "frequency": 1.054920167986144,
        "unique": 4.155265404739747,
        "luq": 0.5846804787410975,
    },
    {
        "texts": ["t0", "t0", "t3", "t0", "t2"],
        "log_probability": [
            -0.8348514553512065, -10.40885380791706, -1.5988862310209728, -2.1374959387139802, -5.951154597913869,
        ],
        "label": [[2, 2, 0, 2, 1], [2, 2, 2, 2, 2], [1, 1, 2, 1, 1], [2, 2, 2, 2, 2], [1, 2, 0, 2, 2]],
        "entailment": [
            [
                0.4332595527039946, 2.59160942971346, -0.07868155006196607, 0.719450503890224, 0.8951553408510945,
            ],
            [
                0.677455205327583, 1.3206182837397102, -3.7337766215999086, -0.8774328142437366, -0.5730969448278422,
            ],
            [
                0.5090796595764052, -2.803424122288623, -1.02946597814616, 1.8733981456388482, 0.438719699958246,
            ],
            [
                2.0798988609121687, -1.17619408153365, 1.2065811004087321, 2.1660515003815037, 1.3971803933982005,
            ],
            [
                -1.1195052774052396, 3.383388734405722, -0.45844318870593176, 2.21924210608965, -0.2398748498791645,
            ],
        ],
        "contradiction": [
            [
                -1.0775812402912779, 3.6442971436400895, -1.1707917398954786, 0.3477482839705066, -1.411095072533952,
            ],
            [
                -1.5344978400508424, 0.9330666442862616, -2.108266329101491, 0.6929768426165547, 0.7681150269453191,
            ],
            [
                -0.061204049396577094, 0.9548276746986981, 1.7091002193308802, 1.6813770927100717, -0.15007914965885974,
            ],
            [
                1.6305330662609683, 3.5807115887710492, -5.382529333363788, -1.7689707043462362, -2.769052995046807,
            ],
            [
                -1.7534934663589965, 1.5011461661149048, 1.8920972548076442, 0.977748095483125, -1.2645055694967477,
            ],
        ],
        "members": [[0, 1, 3], [2], [4]],
        "entropy": 1.8666206343647906,
        "direct": 1.322765018796454,
        "frequency": 0.9502705392332345,
        "unique": 2.0109190389976925,
        "luq": 0.4603488562525335,
    },
]
# fmt: on


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def members(classes: torch.Tensor) -> list[list[int]]:
    return [[i for i, c in enumerate(classes.tolist()) if c == number] for number in range(int(classes.max()) + 1)]


def samples(texts: list[str], log_probability: list[float] | None = None) -> Samples:
    log_probability = [-1.0] * len(texts) if log_probability is None else log_probability
    return Samples([Sample(text, [1], value, "eos") for text, value in zip(texts, log_probability, strict=True)])


# --- LM-Polygraph's numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN, ids=["first", "second"])
def test_numbers_of_lm_polygraph(case):
    classes = semantic_classes(torch.tensor(case["label"]) == 2)
    assert members(classes) == case["members"]
    log_p = double(case["log_probability"])
    counted = first_of_each(case["texts"], classes)
    found = {
        "entropy": semantic_entropy(log_p, classes),
        "direct": semantic_entropy(log_p, classes, estimate="direct"),
        "frequency": semantic_entropy(log_p, classes, class_probability="frequency"),
        "unique": semantic_entropy(log_p, classes, counted=counted),
        "luq": luq(double(case["entailment"]), double(case["contradiction"])),
    }
    for name, value in found.items():
        assert value.item() == pytest.approx(case[name], abs=1e-12), name


@pytest.mark.parametrize("case", GOLDEN, ids=["first", "second"])
def test_methods_on_the_same_numbers(case):
    """As methods, from sampled answers; the logits are made to have the argmax that the case has."""
    given = samples(case["texts"], case["log_probability"])
    label = torch.tensor(case["label"])
    logits = torch.stack([label == 2, label == 1, label == 0], -1).double()
    options = {
        "entropy": {},
        "direct": {"estimate": "direct"},
        "frequency": {"class_probability": "frequency"},
        "unique": {"unique_texts": True},
    }
    for name, chosen in options.items():
        assessment = ap.SemanticEntropy(nli=FixedNLI(logits), **chosen).assess_samples(given)
        assert assessment.uncertainty == pytest.approx(case[name], abs=1e-12), name
        assert members(torch.tensor(assessment.classes)) == case["members"]
        assert assessment.samples == given.samples
    entailment, contradiction = double(case["entailment"]), double(case["contradiction"])
    nli = FixedNLI(torch.stack([entailment, torch.zeros_like(entailment), contradiction], -1))
    assert ap.LUQ(nli=nli).assess_samples(given).uncertainty == pytest.approx(case["luq"], abs=1e-12)


# --- the definitions written out --------------------------------------------------------------------------


def naive_classes(entails: np.ndarray) -> list[int]:
    groups: list[list[int]] = []
    found = []
    for i in range(len(entails)):
        for number, group in enumerate(groups):
            if entails[group[0], i] and entails[i, group[0]]:
                group.append(i)
                found.append(number)
                break
        else:
            groups.append([i])
            found.append(len(groups) - 1)
    return found


def naive_entropy(log_p, classes, estimate="mean", class_probability="sum", counted=None) -> float:
    n = len(log_p)
    of_class = {}
    for c in set(classes):
        ours = [j for j in range(n) if classes[j] == c]
        if class_probability == "frequency":
            of_class[c] = len(ours) / n
        else:
            of_class[c] = math.fsum(math.exp(log_p[j]) for j in ours if counted is None or counted[j])
    if estimate == "mean":
        return -math.fsum(math.log(of_class[c]) for c in classes) / n
    return -math.fsum(of_class[c] * math.log(of_class[c]) for c in classes)


def naive_luq(entailment, contradiction) -> float:
    n = len(entailment)
    total = 0.0
    for i in range(n):
        of_i = 0.0
        for j in range(n):
            if j != i:
                e, c = math.exp(entailment[i, j]), math.exp(contradiction[i, j])
                of_i += e / (e + c)
        total += of_i / (n - 1)
    return 1 - total / n


sizes = st.integers(1, 9)
relations = sizes.flatmap(lambda n: arrays.arrays(bool, (n, n)))
log_probabilities = st.floats(-30, 0)


def logits_of(least: int):
    squares = st.integers(least, 7).map(lambda n: (n, n))
    return squares.flatmap(
        lambda shape: st.tuples(*(arrays.arrays(np.float64, shape, elements=st.floats(-30, 30)) for _ in range(2)))
    )


@given(relations)
def test_classes_are_those_of_the_definition(entails):
    assert semantic_classes(torch.from_numpy(entails)).tolist() == naive_classes(entails)


@given(st.data(), relations)
@pytest.mark.parametrize("options", [{}, {"estimate": "direct"}, {"class_probability": "frequency"}])
def test_entropy_is_that_of_the_definition(options, data, entails):
    n = len(entails)
    log_p = data.draw(st.lists(log_probabilities, min_size=n, max_size=n))
    classes = semantic_classes(torch.from_numpy(entails))
    found = semantic_entropy(double(log_p), classes, **options)
    assert found.item() == pytest.approx(naive_entropy(log_p, classes.tolist(), **options), abs=1e-9, rel=1e-9)


@given(logits_of(2))
def test_luq_is_that_of_the_definition(given_logits):
    entailment, contradiction = given_logits
    found = luq(torch.from_numpy(entailment), torch.from_numpy(contradiction)).item()
    assert found == pytest.approx(naive_luq(entailment, contradiction), abs=1e-12)


def test_leading_dimensions_mean_a_loop():
    generator = torch.Generator().manual_seed(0)
    entails = torch.rand(2, 3, 6, 6, generator=generator) > 0.3
    log_p = -10 * torch.rand(2, 3, 6, generator=generator, dtype=torch.float64)
    entailment = torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64)
    classes = semantic_classes(entails)
    entropy, score = semantic_entropy(log_p, classes), luq(entailment, -entailment.mT)
    assert (classes.shape, entropy.shape, score.shape) == ((2, 3, 6), (2, 3), (2, 3))
    for i in range(2):
        for j in range(3):
            assert classes[i, j].tolist() == naive_classes(entails[i, j].numpy())
            assert entropy[i, j].item() == pytest.approx(naive_entropy(log_p[i, j].tolist(), classes[i, j].tolist()))
            assert score[i, j].item() == pytest.approx(naive_luq(entailment[i, j].numpy(), -entailment[i, j].numpy().T))


@pytest.mark.parametrize(
    ("given_type", "expected"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_types(given_type, expected):
    log_p, logits = torch.tensor([-1.0, -2.0], dtype=given_type), torch.ones(2, 2, dtype=given_type)
    assert semantic_entropy(log_p, torch.tensor([0, 1])).dtype == expected
    assert semantic_entropy(log_p, torch.tensor([0, 1]), class_probability="frequency").dtype == expected
    assert luq(logits, logits).dtype == expected


# --- properties -------------------------------------------------------------------------------------------


@given(sizes)
def test_answers_that_all_agree_are_one_class_and_others_one_each(n):
    assert semantic_classes(torch.ones(n, n, dtype=torch.bool)).tolist() == [0] * n
    assert semantic_classes(torch.eye(n, dtype=torch.bool)).tolist() == list(range(n))
    one_way = torch.ones(n, n, dtype=torch.bool).triu()  # each entails the later ones, none the earlier
    assert semantic_classes(one_way).tolist() == list(range(n))


@given(st.data(), st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_the_order_of_answers_does_not_matter_where_entailment_is_transitive(data, meaning):
    n = len(meaning)
    log_p = double(data.draw(st.lists(log_probabilities, min_size=n, max_size=n)))
    order = data.draw(st.permutations(range(n)))
    means = torch.tensor(meaning)
    entails = means[:, None] == means
    classes = semantic_classes(entails)
    moved = semantic_classes(entails[order][:, order])
    assert torch.equal(moved[:, None] == moved, (means[:, None] == means)[order][:, order])
    for options in ({}, {"estimate": "direct"}, {"class_probability": "frequency"}):
        expected = semantic_entropy(log_p, classes, **options).item()
        assert semantic_entropy(log_p[order], moved, **options).item() == pytest.approx(expected, abs=1e-9)


def test_the_order_of_answers_matters_where_it_is_not():
    """0 agrees with 1, 1 with 2, 0 not with 2."""
    entails = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]]).bool()
    assert semantic_classes(entails).tolist() == [0, 0, 1]
    assert semantic_classes(entails[[1, 0, 2]][:, [1, 0, 2]]).tolist() == [0, 0, 0]


@given(logits_of(2), st.randoms(use_true_random=False))
def test_luq_lies_in_the_unit_interval_and_knows_no_order_and_no_direction(given_logits, random):
    entailment, contradiction = map(torch.from_numpy, given_logits)
    score = luq(entailment, contradiction).item()
    assert -1e-12 <= score <= 1 + 1e-12
    order = list(range(len(entailment)))
    random.shuffle(order)
    assert luq(entailment[order][:, order], contradiction[order][:, order]).item() == pytest.approx(score, abs=1e-12)
    assert luq(entailment.mT, contradiction.mT).item() == pytest.approx(score, abs=1e-12)
    assert luq(contradiction, entailment).item() == pytest.approx(1 - score, abs=1e-12)


@settings(max_examples=20)
@given(logits_of(2), st.floats(-1e4, 1e4))
def test_neither_score_reads_the_diagonal(given_logits, value):
    entailment, contradiction = map(torch.from_numpy, given_logits)
    other = entailment.clone().fill_diagonal_(value)
    assert luq(other, contradiction).item() == luq(entailment, contradiction).item()
    entails = entailment > 0
    assert torch.equal(semantic_classes(entails), semantic_classes(entails.clone().fill_diagonal_(value > 0)))


def test_extremes():
    huge = torch.full((3, 3), 1e4)
    assert luq(huge, -huge).item() == 0.0
    assert luq(-huge, huge).item() == 1.0
    assert luq(huge, huge).item() == 0.5
    assert semantic_entropy(double([-1234.5]), torch.tensor([0])).item() == 1234.5
    assert semantic_entropy(double([-2000.0, -2000.0]), torch.tensor([0, 0])).item() == pytest.approx(
        2000 - math.log(2)
    )
    never = double([-math.inf, -1.0])
    assert semantic_entropy(never, torch.tensor([0, 1])).item() == math.inf
    assert semantic_entropy(never, torch.tensor([0, 0])).item() == 1.0
    assert semantic_entropy(never, torch.tensor([0, 1]), estimate="direct").item() == pytest.approx(math.exp(-1))
    assert semantic_entropy(never, torch.tensor([0, 0]), class_probability="frequency").item() == 0.0


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_unique_texts_count_once(texts):
    """With one class a text, each class has the probability of its first member."""
    log_p = [-1.0 - i for i in range(len(texts))]
    method = ap.SemanticEntropy(unique_texts=True, nli=RuleNLI(key=lambda text: text))
    expected = -math.fsum(log_p[texts.index(text)] for text in texts) / len(texts)
    assert method.assess_samples(samples(texts, log_p)).uncertainty == pytest.approx(expected, abs=1e-12)


# --- methods ----------------------------------------------------------------------------------------------


def test_equal_texts_are_one_class_whatever_the_model_says():
    contradicts = FixedNLI(torch.tensor([-1.0, 0.0, 1.0]).expand(4, 4, 3))
    assessment = ap.SemanticEntropy(nli=contradicts).assess_samples(samples(["a", "b", "a", "a"]))
    assert assessment.classes == (0, 1, 0, 0)
    tied = FixedNLI(torch.zeros(2, 2, 3))  # entailment must be the most probable label alone
    assert ap.SemanticEntropy(nli=tied).assess_samples(samples(["a", "b"])).classes == (0, 1)


def test_an_nli_model_compares_samples_once():
    nli, other = RuleNLI(), RuleNLI()
    given = samples(["a x", "a y", "b"])
    first = ap.SemanticEntropy(nli=nli).assess_samples(given)
    ap.LUQ(nli=nli).assess_samples(given)
    ap.SemanticEntropy(nli=nli, estimate="direct").assess_samples(given)
    assert nli.asked == [["a x", "a y", "b"]]
    assert ap.SemanticEntropy(nli=other).assess_samples(given).uncertainty == first.uncertainty
    assert other.asked == [["a x", "a y", "b"]]
    assert first.classes == (0, 0, 1)


def test_two_labels_serve_semantic_entropy_alone():
    given = samples(["a x", "a y", "b"])
    two, three = RuleNLI(n_labels=2), RuleNLI()
    assert ap.SemanticEntropy(nli=two).assess_samples(given) == ap.SemanticEntropy(nli=three).assess_samples(given)
    with pytest.raises(ValueError, match="LUQ needs an NLI model that tells contradiction, and this one has"):
        ap.LUQ(nli=two).assess_samples(given)


def test_a_method_of_ones_own():
    class Meanings(SampledMethod):
        name = "meanings"

        def assess_samples(self, samples):
            entails = samples.compared_by(self.nli).entails
            return ap.uncertainty.Assessment(float(semantic_classes(entails).max() + 1))

    assert Meanings(nli=RuleNLI(), n_samples=3).assess_samples(samples(["a", "b", "a c"])).uncertainty == 2.0
    assert (Meanings().n_samples, Meanings().temperature, Meanings().top_k, Meanings().top_p) == (10, 1.0, 50, None)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (ap.SemanticEntropy(), "SemanticEntropy"),
        (ap.SemanticEntropy(estimate="direct"), "SemanticEntropy-direct"),
        (ap.SemanticEntropy(class_probability="frequency", n_samples=3), "SemanticEntropy-frequency-n3"),
        (ap.SemanticEntropy(unique_texts=True, top_k=None), "SemanticEntropy-unique-kNone"),
        (ap.LUQ(), "LUQ"),
        (ap.LUQ(temperature=0.5, top_p=0.9), "LUQ-temperature0.5-p0.9"),
    ],
)
def test_other_settings_have_other_names(method, name):
    assert method.name == name


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: ap.SemanticEntropy(estimate="median"), ValueError, "unknown estimate 'median': use 'mean' or"),
        (lambda: ap.SemanticEntropy(class_probability="max"), ValueError, "unknown class_probability 'max'"),
        (
            lambda: ap.SemanticEntropy(class_probability="frequency", unique_texts=True),
            ValueError,
            "unique_texts leaves repetitions out",
        ),
        (lambda: ap.LUQ(n_samples=1), ValueError, "n_samples must be at least 2"),
        (lambda: ap.LUQ(n_samples=0), ValueError, "n_samples=0: use a whole number"),
        (lambda: ap.LUQ(n_samples=True), ValueError, "n_samples=True: use a whole number"),
        (lambda: ap.SemanticEntropy(n_samples=2.5), ValueError, "n_samples=2.5: use a whole number"),
        (lambda: ap.SemanticEntropy(temperature=0), ValueError, "temperature=0: use a number above 0"),
        (lambda: ap.SemanticEntropy(temperature=math.nan), ValueError, "temperature=nan: use a number above 0"),
        (lambda: ap.SemanticEntropy(top_k=0), ValueError, "top_k=0: use a whole number"),
        (lambda: ap.SemanticEntropy(top_p=1.5), ValueError, "top_p=1.5: use a number above 0 and at most 1"),
        (lambda: ap.SemanticEntropy(nli=7), TypeError, "nli=7: give an NLI"),
        (lambda: ap.SemanticEntropy(nli=RuleNLI), TypeError, "give an NLI"),
        (lambda: Samples([]), ValueError, "there are no samples"),
        (
            lambda: samples(["a", "b"]).compared_by(FixedNLI(torch.zeros(2, 2))),
            ValueError,
            r"a matrix of shape \(2, 2\) for 2 answers: it must be \(2, 2, 3\)",
        ),
        (
            lambda: samples(["a", "b"]).compared_by(FixedNLI(torch.full((2, 2, 3), math.nan))),
            ValueError,
            "logits that are not finite",
        ),
        (lambda: semantic_classes(torch.ones(2, 2)), TypeError, "must be a boolean tensor"),
        (lambda: semantic_classes(torch.ones(2, 3).bool()), ValueError, r"its shape is \(2, 3\)"),
        (lambda: semantic_classes(torch.ones(0, 0).bool()), ValueError, "entails is empty"),
        (lambda: semantic_entropy([-1.0], torch.tensor([0])), TypeError, "must be a floating-point tensor"),
        (lambda: semantic_entropy(double([-1]), double([0])), TypeError, "whole numbers"),
        (lambda: semantic_entropy(double([-1]), torch.tensor([0, 1])), ValueError, "must have one shape"),
        (lambda: semantic_entropy(double([]), torch.tensor([]).long()), ValueError, "log_probability is empty"),
        (lambda: semantic_entropy(double([math.nan]), torch.tensor([0])), ValueError, "without NaN"),
        (lambda: semantic_entropy(double([-1]), torch.tensor([0]), estimate="max"), ValueError, "estimate='max'"),
        (
            lambda: semantic_entropy(double([-1]), torch.tensor([0]), counted=torch.tensor([False])),
            ValueError,
            "counted leaves out every answer of some class",
        ),
        (
            lambda: semantic_entropy(double([-1]), torch.tensor([0]), counted=torch.tensor([1])),
            TypeError,
            "counted must be a boolean tensor",
        ),
        (lambda: luq(torch.ones(1, 1), torch.ones(1, 1)), ValueError, "at least two"),
        (lambda: luq(torch.ones(2, 2).long(), torch.ones(2, 2)), TypeError, "entailment must be a floating-point"),
        (lambda: luq(torch.ones(2, 2), torch.ones(3, 3)), ValueError, "must have one shape"),
        (lambda: luq(torch.ones(2, 2), torch.full((2, 2), math.nan)), ValueError, "without NaN"),
    ],
)
def test_errors_are_one_sentence(make, error, sentence):
    with pytest.raises(error, match=sentence) as raised:
        make()
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")
