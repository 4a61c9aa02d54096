"""Prompts from templates, with text in the rows that looks like a template."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.bench.prompts import Template, check_item_template, join, lettered, render_question, render_shot

HOSTILE = [
    "{question}",
    "{answer}",
    "{0}",
    "{",
    "}",
    "{{",
    "{}",
    "{question.__class__.__mro__}",
    "{x!r:>{w}}",
    "%s",
    "$q",
    "\\g<1>",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_row_holds_is_only_text(text):
    template = Template("Q: {question}\nA:{answer}")
    assert render_question(template, {"question": text}) == f"Q: {text}\nA:"
    assert render_shot(template, {"question": text}, text) == f"Q: {text}\nA:{text}"
    assert render_shot(template, {"question": text, "answer": "the right one"}, "said") == f"Q: {text}\nA:said"


@settings(deadline=None)
@given(st.text(), st.text())
def test_any_text_comes_out_as_it_went_in(question, answer):
    filled = render_shot(Template("<{question}>{{}}{answer}"), {"question": question}, answer)
    assert filled == f"<{question}>{{}}{answer}"


@settings(deadline=None)
@given(st.text(alphabet="{}q a.!:0[]"))
def test_a_template_is_filled_or_refused_when_it_is_made(text):
    try:
        template = Template(text)
    except ValueError as error:
        sentence = str(error)
        assert "brace" in sentence
    else:
        assert template.fill(dict.fromkeys(template.names, "x")).count("x") >= len(template.names)


@pytest.mark.parametrize(
    "text", ["{", "}", "{question", "{question.x}", "{question[0]}", "{question!r}", "{0}", "{}", "{a b}"]
)
def test_a_brace_that_is_no_field(text):
    with pytest.raises(ValueError, match="a brace that begins no field"):
        Template(text)


@pytest.mark.parametrize("template", ["Q: {question}\nA: {answer}", "Q: {question}\nA:  ", "Q: {question}\nA:"])
def test_no_prompt_ends_with_the_space_before_its_answer(template):
    assert render_question(check_item_template(template), {"question": "x"}) == "Q: x\nA:"


def test_the_answer_of_a_template_with_braces_around_it_is_not_its_answer():
    assert check_item_template("{{answer}} {question}").fill({"question": "x"}) == "{answer} x"
    with pytest.raises(ValueError, match="before its end"):
        check_item_template("{question}{{{answer}}}")


def test_joining_and_letters():
    assert join("", [], "Q", "\n") == "Q"
    assert join("P\n", ["a", "b"], "Q", "--") == "P\na--b--Q"
    assert lettered(["{x}", "y"]) == "A. {x}\nB. y"
