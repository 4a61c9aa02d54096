"""Quality of answers: hand-computed values, the rouge-score library, properties, and functions of one's own."""

import math
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from attnprobe.bench.example import Example
from attnprobe.bench.quality import QUALITIES, WITHOUT_A_MODEL, quality_function, tokens

TEXT = st.text(alphabet="ab theTHE.,'é1\n", max_size=24)
REFERENCE = TEXT.filter(str.strip)


def measure(name, text, *references, **more):
    return quality_function(name, **more)(Example("e1", "prompt", references), text)


# --- hand-computed values ----------------------------------------------------------------------------------

EXACT = [
    (" The Beatles!\n", ["beatles"], 1),
    ("beatles", ["the Beatles"], 1),
    ("Beatle", ["Beatles"], 0),
    ("U.S.", ["us"], 1),
    ("New  York", ["new york", "NYC"], 1),
    ("nyc", ["new york", "NYC"], 1),
    ("", ["x"], 0),
    ("the", ["A"], 0),
    ("A", ["a"], 1),
    ("The The", ["THE THE"], 1),
    ("-", ["!"], 0),
    ("café", ["cafe"], 0),
    ("theory", ["ory"], 0),
]


@pytest.mark.parametrize(("text", "references", "expected"), EXACT)
def test_exact_match(text, references, expected):
    assert measure("exact_match", text, *references) == expected


F1 = [
    ("the red car", ["red car"], 1.0),
    ("red", ["red car"], 2 / 3),
    ("a red red bike", ["red car"], 2 * 1 / (3 + 2)),
    ("red red", ["red red car"], 4 / 5),
    ("blue", ["red car"], 0.0),
    ("blue", ["red car", "light blue"], 2 / 3),
    ("", ["x"], 0.0),
    ("the", ["a"], 0.0),
]


@pytest.mark.parametrize(("text", "references", "expected"), F1)
def test_token_f1(text, references, expected):
    assert measure("token_f1", text, *references) == pytest.approx(expected)


CONTAINS = [
    ("It is in New York, I think.", ["new york"], 1),
    ("York New", ["New York"], 0),
    ("a cart", ["art"], 0),
    ("art of the deal", ["The Art"], 1),
    ("no", ["yes", "no"], 1),
    ("", ["x"], 0),
    ("the cat", ["the"], 0),
    ("x", ["x y"], 0),
]


@pytest.mark.parametrize(("text", "references", "expected"), CONTAINS)
def test_contains(text, references, expected):
    assert measure("contains", text, *references) == expected


LETTERS = [
    ("A", 1),
    (" A", 1),
    ("a", 1),
    ("A.", 1),
    ("A) x", 1),
    ("A\n", 1),
    ("B", 0),
    ("Apple", 0),
    ("", 0),
    ("the A", 0),
]


@pytest.mark.parametrize(("text", "expected"), LETTERS)
def test_exact_match_of_choices_is_the_first_letter(text, expected):
    quality = quality_function("exact_match")
    assert quality(Example("1", "p", ("A",), fields={"choices": ("x", "y")}), text) == expected


def test_rouge_l_by_hand():
    # the longest common subsequence has 2 stems of 3 and of 4
    assert measure("rouge_l", "cats sat here", "the cat is sitting") == pytest.approx(
        2 * (1 / 3) * (1 / 4) / (1 / 3 + 1 / 4)
    )
    assert measure("rouge_l", "walking dogs", "walk dog") == 1


@settings(deadline=None)
@given(
    TEXT,
    st.lists(REFERENCE.filter(lambda text: any(c.isascii() and c.isalnum() for c in text)), min_size=1, max_size=3),
)
def test_rouge_l_is_what_the_library_says(text, references):
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    expected = max(scorer.score(reference, text)["rougeL"].fmeasure for reference in references)
    assert measure("rouge_l", text, *references) == pytest.approx(expected)


def test_rouge_l_does_not_say_0_of_a_script_that_it_cannot_read():
    with pytest.raises(ValueError, match="'e1' cannot be measured: no reference has a letter from a to z"):
        measure("rouge_l", "Москва", "Москва")
    assert measure("rouge_l", "Moscow", "Москва", "Moscow") == 1


def test_token_f1_reads_any_script():
    assert measure("token_f1", "город Москва", "Москва") == pytest.approx(2 / 3)


# --- properties --------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(REFERENCE, REFERENCE)
def test_f1_is_symmetric_and_1_for_equal_texts(one, other):
    assert measure("token_f1", one, other) == measure("token_f1", other, one)
    assert measure("token_f1", one, one) == 1
    assert measure("exact_match", one, one) == 1
    assert measure("contains", one, one) == 1


@pytest.mark.parametrize("name", WITHOUT_A_MODEL)
@settings(deadline=None)
@given(
    text=TEXT, references=st.lists(st.sampled_from(["a b", "the", "b1", "B!", "é1", "a"]), min_size=1), data=st.data()
)
def test_the_order_of_references_is_irrelevant_and_more_never_hurt(name, text, references, data):
    value = measure(name, text, *references)
    assert 0 <= value <= 1
    assert measure(name, text, *data.draw(st.permutations(references))) == value
    assert measure(name, text, *references, "b1 more") >= value


@settings(deadline=None)
@given(TEXT, REFERENCE)
def test_stricter_qualities_are_never_larger(text, reference):
    exact, f1, within = (measure(name, text, reference) for name in ("exact_match", "token_f1", "contains"))
    assert exact <= f1
    assert exact <= within
    assert (f1 == 0) == (not set(tokens(text)) & set(tokens(reference)))


# --- functions of one's own --------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path, monkeypatch, request):
    """A module of one's own in the folder that one is in."""
    name = "own_" + re.sub(r"\W", "_", request.node.name)
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        return name

    yield write
    sys.modules.pop(name, None)


def test_a_function_of_ones_own(own):
    name = own(
        "def length(example, text):\n    return len(text) / len(example.references[0])\nclass Q:\n    same = length\n"
    )
    path = list(sys.path)
    assert measure(f"{name}:length", "ab", "abcd") == 0.5
    assert measure(f"{name}:Q.same", "abc", "abcd") == 0.75
    assert sys.path == path


@pytest.mark.parametrize(
    ("text", "attribute", "expected"),
    [
        ("x = 3", "x", "is a int, not a function"),
        ("x = 3", "y", "cannot be imported: AttributeError"),
        ("x = ", "x", "cannot be imported: SyntaxError"),
        ("1 / 0", "x", "cannot be imported: ZeroDivisionError"),
        ("import not_there_at_all", "x", "cannot be imported: ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("x = 3", "", "cannot be imported"),
    ],
)
def test_a_function_that_cannot_be_had(own, text, attribute, expected):
    name = own(text)
    with pytest.raises(ValueError, match=expected):
        quality_function(f"{name}:{attribute}")


@pytest.mark.parametrize("name", ["no_such_module_here:f", ":f", "a b:c", "..x:y", ":"])
def test_a_module_that_is_not_there(name):
    with pytest.raises(ValueError, match="cannot be imported"):
        quality_function(name)


@pytest.mark.parametrize(
    "value", ["float('nan')", "float('inf')", "'much'", "None", "[1, 2]", "1 / 0", "example.nothing"]
)
def test_what_is_no_finite_number_names_the_example(own, value):
    name = own(f"def f(example, text):\n    return {value}\n")
    with pytest.raises(ValueError, match="of the example 'e1'"):
        measure(f"{name}:f", "x", "y")


def test_numbers_of_other_kinds_are_numbers(own):
    name = own(
        "import numpy\ndef f(example, text):\n    return numpy.float32(0.5)\ndef g(example, text):\n    return True\n"
    )
    assert measure(f"{name}:f", "x", "y") == 0.5
    assert measure(f"{name}:g", "x", "y") is not True


def test_an_unknown_quality():
    with pytest.raises(ValueError, match="there is no quality 'bleu': there are rouge_l"):
        quality_function("bleu")


def test_rouge_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.delitem(sys.modules, "rouge_score.rouge_scorer", raising=False)
    with pytest.raises(ImportError, match=r'pip install "attnprobe\[bench\]"'):
        quality_function("rouge_l")


# --- AlignScore's directions -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in QUALITIES if name.startswith("align")])
def test_alignscore_without_weights_names_the_others(name):
    with pytest.raises(ValueError, match=r"fetch AlignScore-large\.ckpt.*rouge_l, token_f1, exact_match, contains"):
        quality_function(name)


def overlap(claims, contexts):
    """Which part of a claim's words is in its context: not symmetric, as AlignScore is not."""
    return [
        sum(word in context.split() for word in claim.split()) / len(claim.split())
        for claim, context in zip(claims, contexts, strict=True)
    ]


def test_references_are_claims_and_the_best_counts():
    assert measure("alignscore", "red car here now", "red bike", "car", alignscore=overlap) == 1
    assert measure("alignscore", "red", "red bike", "blue bike", alignscore=overlap) == 0.5
    assert measure("alignscore", " ", "x", "(empty)", alignscore=overlap) == 1


def test_a_summary_is_a_claim_about_its_source():
    quality = quality_function("alignscore_source", alignscore=overlap)
    example = Example("s", "p", ("not read",), source="red car")
    assert quality(example, "red bike") == 0.5
    assert quality(example, "") == 0
    with pytest.raises(ValueError, match="'s' cannot be measured: there is no source"):
        quality(Example("s", "p", ("x",)), "red")


def test_a_scorer_that_fails_names_the_example():
    with pytest.raises(ValueError, match="of the example 'e1' is nan"):
        measure("alignscore", "x", "y", alignscore=lambda claims, contexts: [math.nan])
