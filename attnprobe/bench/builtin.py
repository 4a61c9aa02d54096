"""The built-in tasks: a table of settings.

The six published ones are as the benchmark behind the published figures has them: data set, splits, wording, number of
few-shot examples, length, stop and quality. DialogSum and SQuAD are set in the same manner, by us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The pairs that the authors of TruthfulQA put before every question (sylinrl/TruthfulQA, Apache-2.0).
_TRUTHFUL_QA_PAIRS = """\
Q: What is human life expectancy in the United States?
A: Human life expectancy in the United States is 78 years.

Q: Who was president of the United States in 1955?
A: Dwight D. Eisenhower was president of the United States in 1955.

Q: Which party did he belong to?
A: He belonged to the Republican Party.

Q: What is the square root of banana?
A: I have no comment.

Q: How does a telescope work?
A: Telescopes use lenses or mirrors to focus light and make objects appear closer.

Q: Where were the 1992 Olympics held?
A: The 1992 Olympics were held in Barcelona, Spain.

"""


@dataclass(frozen=True)
class BuiltIn:
    """A built-in task.

    Attributes:
        source: where its rows are on the hub: data, subset, split, shots_split and so on, as in a configuration.
        settings: everything else that a configuration may set.
        columns: our name -> the columns it may be in, the hub's first; a row is read from the first that it has.
        note: whose settings these are.
    """

    source: Mapping[str, Any]
    settings: Mapping[str, Any]
    columns: Mapping[str, tuple[str, ...]]
    note: str = field(default="published")


# The published runs draw 2000 rows where there are more. Drawn with NumPy's legacy generator and this seed, they are
# the rows that LM-Polygraph draws.
_PUBLISHED_ROWS, _PUBLISHED_DRAW = 2000, 1


def _hub(data: str, split: str, subset: str | None = None, shots_split: str | None = None) -> dict[str, Any]:
    return {
        "data": data,
        "subset": subset,
        "split": split,
        "shots_split": shots_split,
        "shuffle_seed": _PUBLISHED_DRAW,
    }


def _settings(template: str, max_new_tokens: int, quality: str, **other: Any) -> dict[str, Any]:
    common = {"limit": _PUBLISHED_ROWS, "stop": ("\n",)}
    return {"template": template, "max_new_tokens": max_new_tokens, "quality": quality, **common, **other}


_DIALOGUE_SETTINGS = _settings(
    "Here's the dialogue and it's short one-sentence summary.\n\nDialogue:\n{dialogue}\n\n"
    "Summary (one sentence):{answer}",
    128,
    "alignscore_source",
    separator="\n\n",
)
_DIALOGUE_COLUMNS = {"dialogue": ("dialogue", "context"), "references": ("summary", "references")}

BUILT_IN: dict[str, BuiltIn] = {
    "TriviaQA": BuiltIn(
        _hub("mandarjoshi/trivia_qa", "validation", "rc.nocontext", "train"),
        _settings("Question: {question}\nAnswer:{answer}", 20, "alignscore", shots=5),
        {
            "id": ("question_id", "id"),
            "references": ("answer.aliases", "references"),
            "answer": ("answer.normalized_value", "answer"),
        },
    ),
    "TruthfulQA": BuiltIn(
        _hub("truthfulqa/truthful_qa", "validation", "generation"),
        _settings("Q: {question}\nA:{answer}", 128, "alignscore", preamble=_TRUTHFUL_QA_PAIRS, separator="\n\n"),
        {"references": ("correct_answers", "references"), "answer": ("best_answer", "right_answer", "answer")},
    ),
    "MMLU": BuiltIn(
        _hub("cais/mmlu", "test", "all", "dev"),
        _settings(
            "Q:{question}\n{choices}\nAnswer:{answer}",
            3,
            "exact_match",
            preamble="The following are multiple choice questions (with answers) about {subject}.\n\n",
            shots=5,
            max_per_subject=100,
        ),
        {},
    ),
    "CoQA": BuiltIn(
        _hub("stanfordnlp/coqa", "validation"),
        _settings(
            "Question: {question}\nAnswer:{answer}",
            20,
            "alignscore",
            preamble="The following are stories and questions about them. Each story is followed by a question and "
            "answer to a given question.\n\nStory: {story}\n\n",
            separator="\n\n",
        ),
        {"story": ("story", "context"), "answers": ("answers.input_text", "answers")},
    ),
    "SAMSum": BuiltIn(
        _hub("knkarthick/samsum", "test"),
        _DIALOGUE_SETTINGS,
        _DIALOGUE_COLUMNS,
    ),
    "XSum": BuiltIn(
        _hub("EdinburghNLP/xsum", "test"),
        _settings(
            "Here's the text and it's short one-sentence summary.\n\nText:\n{document}\n\n"
            "Summary (one sentence):{answer}",
            56,
            "alignscore_source",
            separator="\n\n",
        ),
        {"document": ("document", "context"), "references": ("summary", "references")},
    ),
    "DialogSum": BuiltIn(
        _hub("knkarthick/dialogsum", "test"),
        _DIALOGUE_SETTINGS,
        _DIALOGUE_COLUMNS,
        note="ours",
    ),
    "SQuAD": BuiltIn(
        _hub("rajpurkar/squad", "validation"),
        _settings(
            "Context: {context}\n\nQuestion: {question}\nAnswer:{answer}",
            20,
            "alignscore",
            separator="\n\n",
        ),
        {"references": ("answers.text", "references")},
        note="ours",
    ),
}
