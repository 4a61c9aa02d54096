"""Data sets of labelled answers: where they are, which column is what, and how a row becomes a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attnprobe.bench.config_errors import nearest

#: What a row may have, under our names.
NAMES = ("id", "group", "prompt", "question", "context", "answer", "label", "right", "hallucinated")

_QUESTION = "Question: {question}\nAnswer:"
_READING = "{context}\nQuestion: {question}\nAnswer:"
_SUMMARY = "{context}\nSummary:"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How to read a data set of labelled answers.

    A row has either an answer and its label (`answer`, `label`: 1, true or yes = hallucinated), or answers of both
    kinds (`right`, `hallucinated`: a text or a list of texts each).

    Attributes:
        name: of the recipe.
        template: the prompt, with names in braces; the answer follows after a space.
        columns: our name -> the columns it may be in; a row is read from the first that it has.
        data, subset, split: where the rows are on the hub; data is None where they are on no hub.
        prepare: what makes such a row of one in the authors' own form.
    """

    name: str
    template: str
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    data: str | None = None
    subset: str | None = None
    split: str | None = None
    prepare: Callable[[Row], Row] | None = None

    def columns_of(self, name: str) -> tuple[str, ...]:
        """The columns that `name` may be in: its own name where the recipe says nothing."""
        return self.columns.get(name, (name,))


def recipe_names() -> tuple[str, ...]:
    """The names of the recipes.

    >>> recipe_names()[:2]
    ('halueval_qa', 'halueval_general')
    """
    return tuple(_RECIPES)


def recipe_of(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        ValueError: there is none; the sentence says the nearest one.

    >>> recipe_of("medhallu").data
    'UTAustin-AIHealth/MedHallu'
    """
    if name not in _RECIPES:
        near = nearest(name, _RECIPES)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(_RECIPES)}"
        raise ValueError(f"there is no recipe {name!r}: {hint}")
    return _RECIPES[name]


def _qags(row: Row) -> Row:
    """A summary counts as hallucinated if most of its annotators deny any one of its sentences."""
    if "summary" in row or not isinstance(row.get("summary_sentences"), list):
        return row
    sentences = row["summary_sentences"]
    denied = [
        sum(vote["response"] == "no" for vote in sentence["responses"]) * 2 > len(sentence["responses"])
        for sentence in sentences
    ]
    summary = " ".join(sentence["sentence"].strip() for sentence in sentences)
    return {**row, "summary": summary, "hallucinated": any(denied)}


_PAIR = {"right": ("right_answer",), "hallucinated": ("hallucinated_answer",)}
_QAGS_COLUMNS = {
    "context": ("context", "article"),
    "answer": ("summary",),
    "label": ("hallucinated",),
    "right": (),
    "hallucinated": (),
}

_RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "halueval_qa",
            _READING,
            {**_PAIR, "context": ("context", "knowledge")},
            data="pminervini/HaluEval",
            subset="qa",
            split="data",
        ),
        Recipe(
            "halueval_general",
            _QUESTION,
            {
                "id": ("id", "ID"),
                "question": ("question", "user_query"),
                "answer": ("answer", "chatgpt_response"),
                "label": ("hallucinated", "hallucination"),
                "right": (),
                "hallucinated": (),
            },
            data="pminervini/HaluEval",
            subset="general",
            split="data",
        ),
        Recipe(
            "medhallu",
            _READING,
            {
                "question": ("question", "Question"),
                "context": ("context", "Knowledge"),
                "right": ("right_answer", "Ground Truth"),
                "hallucinated": ("hallucinated_answer", "Hallucinated Answer"),
            },
            data="UTAustin-AIHealth/MedHallu",
            subset="pqa_labeled",
            split="train",
        ),
        Recipe(
            "fib",
            _SUMMARY,
            {
                "group": ("xsum_id", "id"),
                "context": ("context", "input"),
                "right": ("right_answer", "correct_choice"),
                "hallucinated": ("hallucinated_answer", "list_choices"),
            },
            data="r-three/fib",
            split="test",
        ),
        Recipe("qags", _SUMMARY, _QAGS_COLUMNS, prepare=_qags),
        Recipe(
            "truthfulqa",
            _QUESTION,
            {
                "right": ("right_answer", "best_answer"),
                "hallucinated": ("hallucinated_answer", "incorrect_answers"),
            },
            data="truthfulqa/truthful_qa",
            subset="generation",
            split="validation",
        ),
        Recipe("plain", "{prompt}"),
    )
}
