"""How good an answer is: a number for an example and the text that the model gave, higher = better.

Quality decides what a benchmark says, so nothing here is chosen silently: a quality that cannot be had is an error that
names the others.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from attnprobe.bench.example import Example
from attnprobe.bench.extra import need
from attnprobe.bench.own_code import imported

WITHOUT_A_MODEL = ("rouge_l", "token_f1", "exact_match", "contains")
WITH_ALIGNSCORE = ("alignscore", "alignscore_source")
QUALITIES = WITHOUT_A_MODEL + WITH_ALIGNSCORE

Quality = Callable[[Example, str], float]
# claims, contexts -> how far each context supports its claim, 0 to 1
Scorer = Callable[[Sequence[str], Sequence[str]], Sequence[float]]

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SCORED_BY_ROUGE = re.compile(r"[a-z0-9]")


def quality_function(name: str, *, alignscore: Scorer | None = None) -> Quality:
    """The quality of that name: a function of an example and the text of an answer.

    Args:
        name: "exact_match", "token_f1", "contains" or "rouge_l", each the best over the references; "alignscore" (how
            far the answer supports a reference, the best of them), "alignscore_source" (how far the source supports
            the answer); or "module:function" for one of your own, found as Python finds modules and in the current
            folder.
        alignscore: what AlignScore says of claims and contexts, for the two that need it.

    Returns:
        A function that gives a finite number, or raises a ValueError that names the example.

    Raises:
        ValueError: an unknown name, a function that cannot be imported, or AlignScore without its weights.
        ImportError: a package that the quality needs is not installed.

    >>> quality = quality_function("token_f1")
    >>> quality(Example("q1", "Who wrote Hamlet?", ("William Shakespeare",)), "It was Shakespeare.")
    0.4
    """
    if name in WITH_ALIGNSCORE and alignscore is None:
        raise ValueError(
            f"the quality {name!r} needs AlignScore's weights, which are not given: fetch AlignScore-large.ckpt from "
            "the hub repository yzha/AlignScore and name it as `alignscore: {checkpoint: ...}`, or choose another "
            f"quality, one of {', '.join(WITHOUT_A_MODEL)}"
        )
    if ":" in name:
        return _checked(name, _imported(name))
    if name not in QUALITIES:
        raise ValueError(f"there is no quality {name!r}: there are {', '.join(QUALITIES)}")
    if name == "rouge_l":
        return _checked(name, _rouge_l())
    if name == "alignscore" and alignscore is not None:
        return _checked(name, _answers_support_references(alignscore))
    if name == "alignscore_source" and alignscore is not None:
        return _checked(name, _sources_support_answers(alignscore))
    return _checked(name, {"exact_match": exact_match, "token_f1": token_f1, "contains": contains}[name])


def exact_match(example: Example, text: str) -> float:
    """1 where the answer is a reference but for case, punctuation, articles and spaces, as SQuAD compares.

    Where the example has choices, the answer is the letter that it begins with.

    >>> exact_match(Example("1", "?", ("The Beatles",)), " beatles.")
    1.0
    >>> exact_match(Example("1", "?", ("B",), fields={"choices": ("x", "y")}), " B. y")
    1.0
    """
    if "choices" in example.fields:
        return float(_first_letter(text) in example.references)
    said = tokens(text)
    return float(any(said == tokens(reference) for reference in example.references))


def token_f1(example: Example, text: str) -> float:
    """F1 of the words that answer and reference share, as SQuAD counts them; the best over the references.

    >>> token_f1(Example("1", "?", ("red car", "blue")), "a red bike")
    0.5
    """
    said = tokens(text)
    return max(_f1(said, tokens(reference)) for reference in example.references)


def contains(example: Example, text: str) -> float:
    """1 where the words of a reference occur in the answer, one after the other.

    >>> contains(Example("1", "?", ("New York",)), "It is in New York.")
    1.0
    >>> contains(Example("1", "?", ("art",)), "It is a cart.")
    0.0
    """
    said = tokens(text)
    return float(any(_occurs(tokens(reference), said) for reference in example.references))


def tokens(text: str) -> list[str]:
    """Words without case, punctuation and articles, as SQuAD has them.

    A text that is nothing but those keeps them: otherwise "The The" would be the same as "A".

    >>> tokens("The Lord of the Rings!"), tokens("The The")
    (['lord', 'of', 'rings'], ['the', 'the'])
    """
    plain = _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
    return plain or text.lower().split()


def _f1(said: list[str], right: list[str]) -> float:
    shared = (Counter(said) & Counter(right)).total()
    if shared == 0:
        return float(said == right)
    return 2 * shared / (len(said) + len(right))


def _occurs(part: list[str], whole: list[str]) -> bool:
    n = len(part)
    return n > 0 and any(whole[i : i + n] == part for i in range(len(whole) - n + 1))


def _first_letter(text: str) -> str:
    """The letter that an answer begins with, "" where it begins with a word such as "Because"."""
    text = text.lstrip()
    return "" if text[1:2].isalnum() else text[:1].upper()


def _rouge_l() -> Quality:
    scorer = need("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=True)

    def rouge_l(example: Example, text: str) -> float:
        """F-measure of the longest common subsequence of stems, the best over the references."""
        # The library reads nothing but a to z and digits. A reference in another script would be 0 whatever is said.
        readable = [reference for reference in example.references if _SCORED_BY_ROUGE.search(reference.lower())]
        if not readable:
            raise ValueError("no reference has a letter from a to z, and rouge_l reads no others: use token_f1")
        return max(scorer.score(reference, text)["rougeL"].fmeasure for reference in readable)

    return rouge_l


def _answers_support_references(alignscore: Scorer) -> Quality:
    def quality(example: Example, text: str) -> float:
        claims = [_said(reference) for reference in example.references]
        return max(alignscore(claims, [_said(text)] * len(claims)))

    return quality


def _sources_support_answers(alignscore: Scorer) -> Quality:
    def quality(example: Example, text: str) -> float:
        if not example.source.strip():
            raise ValueError("there is no source to measure the answer against")
        return alignscore([_said(text)], [example.source])[0]

    return quality


def _said(text: str) -> str:
    # As in the published runs: AlignScore is given something to read where there is nothing.
    return text if text.strip() else "(empty)"


def _imported(name: str) -> Quality:
    found = imported(name, "the quality")
    if not callable(found):
        raise ValueError(f"the quality {name!r} is a {type(found).__name__}, not a function of an example and a text")
    function: Quality = found
    return function


def _checked(name: str, quality: Quality) -> Quality:
    def checked(example: Example, text: str) -> float:
        try:
            value = float(quality(example, text))
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise ValueError(
                f"the quality {name!r} of the example {example.id!r} cannot be measured: {reason}"
            ) from error
        if not math.isfinite(value):
            raise ValueError(
                f"the quality {name!r} of the example {example.id!r} is {value}, which is no finite number"
            )
        return value

    return checked
