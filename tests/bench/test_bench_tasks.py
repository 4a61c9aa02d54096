"""Examples of tasks: wording, few-shot examples that never give an answer away, ids that stay."""

import json
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnprobe.bench.builtin import BUILT_IN
from attnprobe.bench.config import TaskConfig
from attnprobe.bench.tasks import examples, task_names


def write(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(n, first=0):
    return [
        {"id": f"q{i}", "question": f"Question number {i}?", "references": [f"answer {i}"]} for i in range(first, n)
    ]


def trivia(folder, rows, **changes):
    return TaskConfig(**{"task": "TriviaQA", "data": write(folder, rows), "quality": "contains", **changes})


# --- wording -----------------------------------------------------------------------------------------------


def test_triviaqa(tmp_path):
    first, *others = examples(trivia(tmp_path, questions(5), shots=2))
    assert first.prompt == (
        "Question: Question number 0?\nAnswer:answer 0\nQuestion: Question number 1?\nAnswer:answer 1\n"
        "Question: Question number 2?\nAnswer:"
    )
    assert (first.id, first.references, first.source, len(others)) == ("q2", ("answer 2",), "", 2)


def test_truthfulqa(tmp_path):
    task = TaskConfig(task="TruthfulQA", data=write(tmp_path, questions(1)), quality="rouge_l")
    (example,) = examples(task)
    assert example.prompt.startswith("Q: What is human life expectancy in the United States?\nA: Human life")
    assert example.prompt.endswith("held in Barcelona, Spain.\n\nQ: Question number 0?\nA:")
    assert example.prompt.count("Q: ") == 7


def test_truthfulqa_of_the_hub_leaves_empty_answers_out(tmp_path):
    row = {
        "question": "Why?",
        "best_answer": "So.",
        "correct_answers": ["So.", "", "Because."],
        "incorrect_answers": ["No"],
    }
    (example,) = examples(TaskConfig(task="TruthfulQA", data=write(tmp_path, [row]), quality="rouge_l"))
    assert example.references == ("So.", "Because.")
    assert example.id == "1"


def mmlu_rows(subjects=("b_two", "a_one"), n=4, answer=lambda i: i % 4):
    return [
        {"subject": subject, "question": f" {subject} {i}?", "choices": ["w{x}", "x", "y", "z"], "answer": answer(i)}
        for i in range(n)
        for subject in subjects
    ]


def test_mmlu(tmp_path):
    task = TaskConfig(task="MMLU", data=write(tmp_path, mmlu_rows()), shots=2)
    asked = examples(task)
    assert [example.fields["subject"] for example in asked] == ["a_one", "a_one", "b_two", "b_two"]
    assert asked[0].prompt == (
        "The following are multiple choice questions (with answers) about a one.\n\n"
        "Q:a_one 0?\nA. w{x}\nB. x\nC. y\nD. z\nAnswer:A\n"
        "Q:a_one 1?\nA. w{x}\nB. x\nC. y\nD. z\nAnswer:B\n"
        "Q:a_one 2?\nA. w{x}\nB. x\nC. y\nD. z\nAnswer:"
    )
    assert asked[0].references == ("C",)
    assert asked[0].fields["choices"] == ("w{x}", "x", "y", "z")


@pytest.mark.parametrize(
    "answer", [lambda i: i % 4, lambda i: "ABCD"[i % 4], lambda i: "abcd"[i % 4], lambda i: str(i % 4)]
)
def test_mmlu_has_answers_as_letters_and_as_numbers(tmp_path, answer):
    asked = examples(TaskConfig(task="MMLU", data=write(tmp_path, mmlu_rows(answer=answer)), shots=2))
    assert [example.references for example in asked] == [("C",), ("D",)] * 2


@pytest.mark.parametrize("answer", ["E", 4, -1, "", "AB", "ß", 1.5])
def test_an_answer_that_is_no_choice(tmp_path, answer):
    rows = mmlu_rows(answer=lambda i: answer if i else 0)
    with pytest.raises(ValueError, match=r"row 3 of .*: answer is .* none of the 4 choices"):
        examples(TaskConfig(task="MMLU", data=write(tmp_path, rows), shots=2))


@pytest.mark.parametrize("choices", [["x"], [], ["x"] * 27])
def test_a_number_of_choices_that_has_no_letters(tmp_path, choices):
    rows = [{**row, "choices": choices} for row in mmlu_rows()]
    with pytest.raises(ValueError, match="choices has"):
        examples(TaskConfig(task="MMLU", data=write(tmp_path, rows), shots=2))


STORY = {
    "story": "Once {upon}.",
    "questions": ["Who?", "Why? ", "When?"],
    "answers": {"input_text": ["Ada", "so", "now"]},
}


def test_coqa_has_an_example_a_turn_with_all_turns_before(tmp_path):
    task = TaskConfig(task="CoQA", data=write(tmp_path, [STORY, {**STORY, "id": "s"}]), quality="token_f1")
    asked = examples(task)
    assert [example.id for example in asked] == ["1-1", "1-2", "1-3", "s-1", "s-2", "s-3"]
    assert [example.references for example in asked[:3]] == [("Ada",), ("so",), ("now",)]
    assert asked[2].prompt == (
        "The following are stories and questions about them. Each story is followed by a question and answer to a "
        "given question.\n\nStory: Once {upon}.\n\nQuestion: Who?\nAnswer:Ada\n\nQuestion: Why?\nAnswer:so\n\n"
        "Question: When?\nAnswer:"
    )
    assert asked[2].source == "Once {upon}."
    assert asked[2].fields["turn"] == 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"answers": ["Ada"]}, "questions has 3 turns and answers has 1"),
        ({"questions": [], "answers": []}, "questions is empty"),
        ({"answers": ["Ada", " ", "now"]}, "answers has nothing for turn 2"),
        ({"story": None}, "story is missing"),
    ],
)
def test_a_conversation_that_is_broken(tmp_path, change, expected):
    with pytest.raises(ValueError, match=expected):
        examples(TaskConfig(task="CoQA", data=write(tmp_path, [{**STORY, **change}]), quality="token_f1"))


@pytest.mark.parametrize(
    ("name", "column"), [("SAMSum", "dialogue"), ("DialogSum", "dialogue"), ("XSum", "document"), ("XSum", "context")]
)
def test_summaries(tmp_path, name, column):
    rows = [{"id": "1", column: "A: hi\r\nB: {bye}", "summary": "They meet."}]
    (example,) = examples(TaskConfig(task=name, data=write(tmp_path, rows), quality="rouge_l"))
    assert example.prompt.startswith("Here's the")
    assert example.prompt.endswith("A: hi\r\nB: {bye}\n\nSummary (one sentence):")
    assert (example.source, example.references) == ("A: hi\r\nB: {bye}", ("They meet.",))


def test_a_summary_is_not_measured_against_nothing(tmp_path):
    rows = [{"id": "a", "document": " ", "summary": "S"}]
    data = write(tmp_path, rows)
    assert len(examples(TaskConfig(task="XSum", data=data, quality="rouge_l"))) == 1
    with pytest.raises(ValueError, match=r"row 1 of .*id 'a'.* is missing or blank, and quality"):
        examples(TaskConfig(task="XSum", data=data, quality="alignscore_source"))


def test_squad_as_the_hub_has_it(tmp_path):
    rows = [{"id": "s", "context": "C.", "question": "Q?", "answers": {"text": ["a", "b"], "answer_start": [0, 1]}}]
    (example,) = examples(TaskConfig(task="SQuAD", data=write(tmp_path, rows), quality="token_f1"))
    assert example.prompt == "Context: C.\n\nQuestion: Q?\nAnswer:"
    assert (example.references, example.source) == (("a", "b"), "C.")


def test_a_task_of_ones_own(tmp_path):
    rows = [{"q": f"{i}+{i}", "sum": str(2 * i), "unit": "apples"} for i in range(4)]
    task = TaskConfig(
        task="Sums",
        data=write(tmp_path, rows),
        fields={"question": "q", "references": "sum", "unit": "unit"},
        preamble="In {unit}:\n",
        template="{question} =",
        quality="exact_match",
        separator="; ",
        shots=2,
    )
    assert [example.prompt for example in examples(task)] == [
        "In apples:\n0+0 = 0; 1+1 = 2; 2+2 =",
        "In apples:\n0+0 = 0; 1+1 = 2; 3+3 =",
    ]


# --- few-shot examples -------------------------------------------------------------------------------------


def prompt_gives_away(example):
    return example.prompt.count(example.fields["question"]) > 1


def test_the_first_rows_are_examples_and_are_not_asked(tmp_path):
    asked = examples(trivia(tmp_path, questions(9)))
    assert [example.id for example in asked] == ["q5", "q6", "q7", "q8"]
    assert not any(map(prompt_gives_away, asked))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    shots=st.integers(1, 6),
    names=st.lists(st.sampled_from("abcdefgh"), min_size=7, max_size=20),
    own=st.booleans(),
)
def test_no_prompt_has_its_own_question_among_its_examples(tmp_path, seed, shots, names, own):
    rows = [{"question": f"  {name.upper()}{name} ?", "references": [name]} for name in names]
    data = {"shots_data": write(tmp_path, rows, "shots.jsonl")} if own else {}
    try:
        asked = examples(trivia(tmp_path, rows, shots=shots, **data), seed=seed)
    except ValueError as error:
        reason = str(error)
    else:
        assert not any(map(prompt_gives_away, asked))
        return
    assert "no row left to ask" in reason


def test_a_question_that_differs_in_case_and_spaces_is_the_same(tmp_path):
    rows = [*questions(3), {"id": "again", "question": " question  NUMBER 0? ", "references": ["answer 0"]}]
    assert [example.id for example in examples(trivia(tmp_path, rows, shots=1))] == ["q1", "q2"]


def test_the_same_file_for_examples_is_no_leak(tmp_path):
    rows = questions(12)
    data = write(tmp_path, rows)
    asked = examples(trivia(tmp_path, rows, shots_data=data), seed=3)
    assert len(asked) == 7
    assert not any(map(prompt_gives_away, asked))


def test_examples_are_drawn_by_the_seed_as_lm_polygraph_draws(tmp_path):
    shots = write(tmp_path, questions(40), "shots.jsonl")
    task = trivia(tmp_path, questions(44, 40), shots_data=shots)
    np.random.seed(1)
    drawn = np.random.choice(40, 5, replace=False)
    (example, *_) = examples(task, seed=1)
    assert example.prompt.split("\n")[:10:2] == [f"Question: Question number {i}?" for i in drawn]
    assert examples(task, seed=1) == examples(task, seed=1)
    assert examples(task, seed=1)[0].prompt != examples(task, seed=2)[0].prompt


def test_examples_of_a_subject_come_from_it_and_are_the_same_in_any_part(tmp_path):
    shots = write(tmp_path, mmlu_rows(("b_two", "c_three", "a_one"), 9), "shots.jsonl")
    rows = [{**row, "question": row["question"] + "!"} for row in mmlu_rows()]
    task = TaskConfig(task="MMLU", data=write(tmp_path, rows), shots=3, shots_data=shots)
    whole = {example.id: example.prompt for example in examples(task, seed=5)}
    for example in examples(task, seed=5):
        other = "b_two" if example.fields["subject"] == "a_one" else "a_one"
        assert other not in example.prompt.split("\n\n", 1)[1]
    part = examples(task.model_copy(update={"limit": 3, "offset": 2, "shuffle_seed": 8}), seed=5)
    assert {example.id: example.prompt for example in part}.items() <= whole.items()


@pytest.mark.parametrize(
    ("rows", "changes", "expected"),
    [
        (questions(3), {"shots": 3}, "has 3 rows, and shots takes 3 of them and leaves none"),
        (questions(1), {"shots": 5}, "has 1 row, and shots takes 5"),
        (questions(1) * 9, {"shots": 2}, "no row left to ask"),
        (questions(9), {"offset": 4}, "has 4 examples, and offset=4 leaves none"),
    ],
)
def test_too_few_rows(tmp_path, rows, changes, expected):
    with pytest.raises(ValueError, match=expected):
        examples(trivia(tmp_path, rows, **changes))


def test_too_few_rows_of_a_subject(tmp_path):
    with pytest.raises(ValueError, match="4 rows of the subject 'b_two', and shots takes 5"):
        examples(TaskConfig(task="MMLU", data=write(tmp_path, mmlu_rows())))
    shots = write(tmp_path, mmlu_rows(("a_one",)), "shots.jsonl")
    with pytest.raises(ValueError, match=r"takes 4 shots, and .*shots\.jsonl' has 0 rows of the subject 'b_two'"):
        examples(TaskConfig(task="MMLU", data=write(tmp_path, mmlu_rows()), shots=4, shots_data=shots))


def test_the_answer_of_an_example_is_its_answer_where_it_has_one(tmp_path):
    rows = [{**row, "answer": "the usual form"} for row in questions(2)]
    (example,) = examples(trivia(tmp_path, rows, shots=1))
    assert "Answer:the usual form\n" in example.prompt


# --- ids and selection -------------------------------------------------------------------------------------


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["a", "a#2", "a#2'", "b", "1", "2", "", None, 2]), min_size=1, max_size=12))
def test_ids_are_unique_and_the_same_in_any_part(tmp_path, ids):
    rows = [{"id": name, "question": f"{i}?", "references": [str(i)]} for i, name in enumerate(ids)]
    whole = examples(trivia(tmp_path, rows, shots=0, limit=None))
    by_id = {example.id: example for example in whole}
    assert len(by_id) == len(rows)
    part = examples(trivia(tmp_path, rows, shots=0, offset=len(ids) // 2, shuffle_seed=1, limit=4))
    assert all(by_id[example.id] == example for example in part)


def test_rows_without_ids_have_their_numbers(tmp_path):
    rows = [{"question": f"{i}?", "references": ["x"]} for i in range(3)]
    assert [example.id for example in examples(trivia(tmp_path, rows, shots=1))] == ["2", "3"]


def test_offset_and_limit(tmp_path):
    asked = examples(trivia(tmp_path, questions(9), shots=0, offset=2, limit=3))
    assert [example.id for example in asked] == ["q2", "q3", "q4"]


def test_a_shuffle_draws_the_rows_that_lm_polygraph_draws(tmp_path):
    asked = examples(trivia(tmp_path, questions(50), shots=0, shuffle_seed=1, limit=20))
    np.random.seed(1)
    assert [example.id for example in asked] == [f"q{i}" for i in np.random.choice(50, 20, replace=False)]


def test_at_most_so_many_of_a_subject(tmp_path):
    rows = mmlu_rows(("b", "a", "c"), 9)
    random.Random(0).shuffle(rows)
    asked = examples(TaskConfig(task="MMLU", data=write(tmp_path, rows), shots=2, max_per_subject=4))
    assert [example.fields["subject"] for example in asked] == ["a"] * 4 + ["b"] * 4 + ["c"] * 4


def test_random_numbers_of_others_are_left_alone(tmp_path):
    np.random.seed(7)
    expected = np.random.rand()
    np.random.seed(7)
    examples(
        trivia(tmp_path, questions(9), shuffle_seed=1, shots_data=write(tmp_path, questions(9), "s.jsonl"), shots=2)
    )
    assert np.random.rand() == expected


def test_the_built_in_tasks_have_names():
    assert task_names() == list(BUILT_IN)
    assert {"TriviaQA", "TruthfulQA", "MMLU", "CoQA", "SAMSum", "XSum", "DialogSum", "SQuAD"} == set(task_names())
