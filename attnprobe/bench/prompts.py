"""Prompts from templates, safe with any text in the rows, and few-shot examples in front of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from string import ascii_uppercase

# One pass over the template: doubled braces stand for themselves, a name in braces for a field. Anything else in braces
# (attributes, indices, conversions, format specifications) is no template, and what a field holds is never looked at.
_PART = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}|\{|\}")
_LITERAL = {"{{": "{", "}}": "}"}


@dataclass(frozen=True)
class Template:
    """Text with fields in braces: `Question: {question}\\nAnswer:{answer}`.

    `{{` and `}}` are braces. `{answer}`, at the very end, is where the answer of a few-shot example goes.

    Raises:
        ValueError: a brace that stands alone, or something other than a name in braces.

    >>> Template("Q: {question}\\nA:{answer}").names
    ('question', 'answer')
    """

    text: str

    def __post_init__(self) -> None:
        for match in _PART.finditer(self.text):
            if match.group() in ("{", "}"):
                near = self.text[match.start() : match.start() + 20].splitlines()[0]
                raise ValueError(
                    f"the template has a brace that begins no field at {near!r}: fields are names in braces such as "
                    "{question}, and a brace itself is written twice"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The fields, in order, each once."""
        return tuple(dict.fromkeys(name for name in _PART.findall(self.text) if name))

    def fill(self, fields: Mapping[str, str]) -> str:
        """The text with every field in its place; braces inside a field are just text.

        Raises:
            KeyError: a field that is not given.

        >>> Template("{{x}} = {value}").fill({"value": "{value.__class__}"})
        '{x} = {value.__class__}'
        """

        def part(match: re.Match[str]) -> str:
            name = match.group(1)
            return fields[name] if name else _LITERAL[match.group()]

        return _PART.sub(part, self.text)

    def check_names(self, known: Collection[str]) -> None:
        """Raise where a field has a name that no row can have.

        Raises:
            ValueError: an unknown name; the sentence says the nearest one.
        """
        for name in self.names:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {{{near[0]}}}?" if near else f"there are {', '.join(sorted(known))}"
                raise ValueError(f"the template has the field {{{name}}}, which no row has: {hint}")


def check_item_template(text: str) -> Template:
    """The template of one question with its answer.

    Raises:
        ValueError: no field but the answer, or an answer that is not last.

    >>> check_item_template("{question}{answer}").names
    ('question', 'answer')
    """
    template = Template(text)
    if not set(template.names) - {"answer"}:
        raise ValueError("the template has no field of the row, so that every prompt would be the same")
    if "answer" in template.names and not text.endswith("{answer}"):
        raise ValueError("the template has {answer} before its end: a prompt ends where the answer begins")
    if _PART.findall(text).count("answer") > 1:
        raise ValueError("the template has {answer} twice")
    return template


def render_shot(template: Template, fields: Mapping[str, str], answer: str) -> str:
    """One few-shot example: the template with its answer (after a space where the template has no `{answer}`).

    >>> render_shot(Template("Q: {question}\\nA:"), {"question": "1+1?"}, "2")
    'Q: 1+1?\\nA: 2'
    """
    text = template.text if "answer" in template.names else template.text + " {answer}"
    return Template(text).fill({**fields, "answer": answer})


def render_question(template: Template, fields: Mapping[str, str]) -> str:
    """The question that is asked: the template up to its answer, without the space that leads to it.

    A space at the end would be a token of its own, where answers begin with theirs.

    >>> render_question(Template("Q: {question}\\nA: {answer}"), {"question": "1+1?"})
    'Q: 1+1?\\nA:'
    """
    return Template(template.text.removesuffix("{answer}").rstrip(" ")).fill(fields)


def join(preamble: str, shots: Iterable[str], question: str, separator: str) -> str:
    """Everything that comes before, then the question.

    >>> join("Facts.\\n\\n", ["Q: a A: b"], "Q: c A:", "\\n")
    'Facts.\\n\\nQ: a A: b\\nQ: c A:'
    """
    return preamble + separator.join([*shots, question])


def lettered(choices: Iterable[str]) -> str:
    """Choices as lines that begin with their letter.

    >>> lettered(["red", "blue"])
    'A. red\\nB. blue'
    """
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False))
