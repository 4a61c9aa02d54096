"""Rows of every recipe as labelled answers."""

from __future__ import annotations

import json

import pytest
from polarity.labelled import write_pairs

from attnprobe.polarity import LabelledAnswer, answers_of, chosen, source_of
from attnprobe.polarity.answers import content_hash

VOTES = {"yes": ["yes", "yes", "no"], "no": ["no", "yes", "no"]}


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(recipe, tmp_path, *rows):
    return answers_of(source_of(f"{recipe}={jsonl(tmp_path / 'rows.jsonl', *rows)}"))


def facts(answers):
    return [(a.id, a.group, a.answer, a.label) for a in answers]


@pytest.mark.parametrize(
    "row",
    [
        {"knowledge": "K.", "question": "Q?", "right_answer": "yes", "hallucinated_answer": "no"},
        {"context": "K.", "question": "Q?", "right_answer": "yes", "hallucinated_answer": "no"},
    ],
)
def test_halueval_qa_is_two_answers_a_question(row, tmp_path):
    found = read("halueval_qa", tmp_path, row)
    assert facts(found) == [("1:right", "1", "yes", 0), ("1:hallucinated", "1", "no", 1)]
    assert {a.prompt for a in found} == {"K.\nQuestion: Q?\nAnswer:"}


def test_medhallu_as_the_hub_has_it(tmp_path):
    row = {"Question": "Q?", "Knowledge": "K.", "Ground Truth": "yes", "Hallucinated Answer": "no"}
    found = read("medhallu", tmp_path, row)
    assert facts(found) == [("1:right", "1", "yes", 0), ("1:hallucinated", "1", "no", 1)]
    assert found[0].prompt == "K.\nQuestion: Q?\nAnswer:"


def test_halueval_general_has_a_label_an_answer(tmp_path):
    rows = [
        {"ID": "7", "user_query": "Q?", "chatgpt_response": "A", "hallucination": "yes", "hallucination_spans": ["A"]},
        {"ID": "8", "user_query": "R?", "chatgpt_response": "B", "hallucination": "no", "hallucination_spans": []},
    ]
    assert facts(read("halueval_general", tmp_path, *rows)) == [("7", "7", "A", 1), ("8", "8", "B", 0)]


def test_fib_takes_the_choice_that_is_not_the_correct_one(tmp_path):
    row = {"id": "x", "input": "D.", "correct_choice": " good", "list_choices": [" bad", " good"], "lbl": 1}
    found = read("fib", tmp_path, row)
    assert facts(found) == [("x:right", "x", "good", 0), ("x:hallucinated", "x", "bad", 1)]
    assert found[0].prompt == "D.\nSummary:"


def test_fib_rows_of_one_article_are_one_group(tmp_path):
    rows = [
        {"id": f"r{i}", "xsum_id": "article", "context": "D.", "right_answer": "a", "hallucinated_answer": f"b{i}"}
        for i in range(2)
    ]
    assert {a.group for a in read("fib", tmp_path, *rows)} == {"article"}


def test_qags_counts_the_votes_of_every_sentence(tmp_path):
    def row(*kinds):
        sentences = [
            {"sentence": f"S{i}.", "responses": [{"worker_id": 0, "response": vote} for vote in VOTES[kind]]}
            for i, kind in enumerate(kinds)
        ]
        return {"article": "D.", "summary_sentences": sentences}

    found = read("qags", tmp_path, row("yes", "yes"), row("yes", "no"))
    assert facts(found) == [("1", "1", "S0. S1.", 0), ("2", "2", "S0. S1.", 1)]


def test_truthfulqa_reads_every_incorrect_answer_once(tmp_path):
    row = {"question": "Q?", "best_answer": "a", "correct_answers": ["a", "b"], "incorrect_answers": ["c", "d", "c"]}
    found = read("truthfulqa", tmp_path, row)
    assert [(a.id, a.label) for a in found] == [("1:right", 0), ("1:hallucinated-1", 1), ("1:hallucinated-2", 1)]


def test_a_csv_of_our_own_names(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("id,group,prompt,answer,label\n007,g,P {x}:,A,TRUE\n008,g,P {x}:,B,0\n", encoding="utf-8")
    assert answers_of(source_of(str(path))) == [
        LabelledAnswer("007", "g", "P {x}:", "A", 1),
        LabelledAnswer("008", "g", "P {x}:", "B", 0),
    ]


def test_a_yaml_file_maps_fields_and_finds_its_data_beside_it(tmp_path):
    jsonl(
        tmp_path / "rows.jsonl",
        {"ask": {"text": "Q?"}, "out": "A", "bad": 1},
        {"ask": {"text": "R?"}, "out": "B", "bad": 0},
    )
    fields = "fields: {question: ask.text, answer: out, label: bad}\n"
    said = f"data: rows.jsonl\nlabel: mine\ntemplate: 'Q: {{question}} A:'\n{fields}"
    (tmp_path / "mine.yaml").write_text(said, encoding="utf-8")
    source = source_of(str(tmp_path / "mine.yaml"))
    assert source.label == "mine"
    assert [(a.prompt, a.answer, a.label) for a in answers_of(source)] == [
        ("Q: Q? A:", "A", 1),
        ("Q: R? A:", "B", 0),
    ]


def test_a_recipe_by_name_reads_the_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, subset=None, *, split):
        asked.append((name, subset, split))
        return datasets.Dataset.from_list(
            [{"knowledge": "K.", "question": "Q?", "right_answer": "yes", "hallucinated_answer": "no"}]
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(answers_of(source_of("halueval_qa"))) == 2
    assert asked == [("pminervini/HaluEval", "qa", "data")]


def test_fewer_questions_are_among_more():
    answers = [LabelledAnswer(f"{q}{k}", str(q), "p", "a", k) for q in range(20) for k in (0, 1)]
    few, more = ({a.id for a in chosen(answers, n, seed=3)} for n in (5, 9))
    assert (len(few), len(more)) == (10, 18)
    assert few < more
    assert few != {a.id for a in chosen(answers, 5, seed=4)}
    assert chosen(answers, None, seed=3) == answers


def test_content_tells_labels_apart():
    one, two = (content_hash([LabelledAnswer("i", "g", "p", "a", label)]) for label in (0, 1))
    assert one != two


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("halueval", "there is no recipe 'halueval': did you mean 'halueval_qa'"),
        ("qags", "is of no data set on the hub: give a file, qags=FILE"),
        ("owner/name", "is neither a recipe"),
        ("medhallu=owner/name", "split is missing"),
        ("nothing.yaml", "there is no file"),
    ],
)
def test_what_names_no_source(said, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        source_of(said)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("feilds: {}\ndata: a.jsonl\n", "unknown key 'feilds': did you mean 'fields'"),
        ("data: a.jsonl\nfields: {lable: x}\n", "fields has 'lable', which is no name of ours"),
        ("data: a.jsonl\ntemplate: '{qestion}'\n", "did you mean {question}"),
        ("data: a.jsonl\nlabel: ../up\n", "names a folder too"),
        ("data: [1]\n", "must be text"),
    ],
)
def test_what_a_yaml_file_cannot_say(said, message, tmp_path):
    (tmp_path / "mine.yaml").write_text(said, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        source_of(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "p", "answer": "a"}], "row 1 of .*: label is missing: it should be in the column 'label'"),
        ([{"prompt": "p", "answer": "a", "label": "maybe"}], "label is 'maybe': use 1, true or yes"),
        ([{"prompt": "p", "answer": " ", "label": 1}], "answer is blank"),
        ([{"prompt": "p", "answer": 3, "label": 1}], "answer is int, and must be text"),
        ([{"prompt": "p", "answer": "\ud800", "label": 1}], "half a character"),
        ([{"prompt": "p", "answer": "a", "label": 1}], "all 1 answers of .* have the label 1"),
        ([{"id": "x", "prompt": "p", "answer": "a", "label": k} for k in (0, 1)], "two answers with the id 'x'"),
        ([{"prompt": "p", "right": "a", "hallucinated": "a"}], "nothing that is not among the right answers"),
        ([{"prompt": "p", "right": "a", "hallucinated": ["b", 4]}], "something that is no text"),
    ],
)
def test_rows_that_cannot_be_read(rows, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read("plain", tmp_path, *rows)


def test_the_plain_recipe_takes_the_name_of_its_file(tmp_path):
    source = source_of(str(write_pairs(tmp_path / "mine.jsonl", 2)))
    assert (source.label, len(answers_of(source))) == ("mine", 4)
