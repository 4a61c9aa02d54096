"""Reports against numbers by hand, and tables against what readers of them read back."""

from __future__ import annotations

import io
import math
import warnings

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("pyarrow", reason="the benchmark's packages are not installed")

from attnprobe.bench import published
from attnprobe.bench.reporting import report
from attnprobe.bench.store import Record, Row, open_store
from attnprobe.bench.tables import Section, latex, markdown

METHODS = ("SAUQ", "RAUQ", "Perplexity")
QUICK = dict(resamples=50, permutations=49)


def save(
    folder,
    answers: dict[str, list[Row]],
    *,
    methods=METHODS,
    model="tiny",
    kinds: dict[str, str] | None = None,
    max_rejection=0.5,
    config: dict | None = None,
):
    """An output folder with these rows."""
    tasks = [{"label": label, "task": (kinds or {}).get(label, label), "quality": "alignscore"} for label in answers]
    record = Record(
        config={"tasks": tasks, "max_rejection": max_rejection, **(config or {})},
        fingerprint="x",
        methods=tuple(methods),
        tasks=tuple(answers),
        model=model,
        versions=({},),
    )
    with open_store(folder, record) as store:
        for rows in answers.values():
            store.append(rows)
    return folder


def rows(task: str, n: int = 12, seed: int = 0, methods=METHODS, binary: bool = False) -> list[Row]:
    generator = np.random.default_rng(seed)
    quality = generator.random(n).round(2)
    if binary:
        quality = (quality > 0.4).astype(float)
    return [
        Row(
            task,
            f"q{i}",
            prompt_tokens=10 + i,
            tokens=int(generator.integers(1, 9)),
            text="x",
            finish="eos",
            quality=float(quality[i]),
            seconds=0.5,
            scores={method: float(generator.random() - quality[i]) for method in methods},
        )
        for i in range(n)
    ]


def prr_by_hand(uncertainty: list[float], quality: list[float], max_rejection: float) -> float:
    """As it is defined, without ties: running means of quality, the last m of them."""
    n = len(quality)
    m = int(max_rejection * n)

    def area(order):
        kept = [quality[i] for i in order]
        means = [sum(kept[:k]) / k for k in range(1, n + 1)]
        return sum(means[-m:]) / m

    score = area(sorted(range(n), key=lambda i: uncertainty[i]))
    oracle = area(sorted(range(n), key=lambda i: -quality[i]))
    chance = sum(quality) / n
    return (score - chance) / (oracle - chance)


def spearman_by_hand(a: list[float], b: list[float]) -> float:
    def ranks(values):
        return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]

    x, y = np.array(ranks(a)), np.array(ranks(b))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / math.sqrt((x**2).sum() * (y**2).sum()))


# --- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_rejection", [0.5, 1.0])
def test_the_figures_are_those_by_hand(tmp_path, max_rejection):
    answers = rows("T")
    failed = [Row("T", "bad", error="no"), Row("T", "worse", text="x", tokens=3, quality=None, error="no quality")]
    made = report(save(tmp_path, {"T": [*answers, *failed]}), max_rejection=max_rejection, **QUICK)
    frame = made.to_frame().set_index("method")
    assert list(frame.index) == list(METHODS)
    quality = [row.quality for row in answers]
    for method in METHODS:
        scores = [row.scores[method] for row in answers]
        found = frame.loc[method]
        assert found["value"] == pytest.approx(prr_by_hand(scores, quality, max_rejection))
        assert found["low"] <= found["value"] <= found["high"]
        assert found["length_correlation"] == pytest.approx(spearman_by_hand(scores, [row.tokens for row in answers]))
        assert found["difference"] == pytest.approx(found["value"] - frame.loc["SAUQ", "value"]) or method == "SAUQ"
        assert (found["answers"], found["failed"]) == (12, 2)
        assert found["quality"] == pytest.approx(sum(quality) / 12)
        assert found["tokens"] == pytest.approx(sum(row.tokens for row in answers) / 12)
        assert found["prompt_tokens"] == pytest.approx(15.5)
        assert found["seconds"] == 0.5
    assert math.isnan(frame.loc["SAUQ", "difference"])
    assert frame.loc[["RAUQ", "Perplexity"], ["p", "p_holm"]].notna().all().all()


def test_intervals_and_comparison_are_those_of_the_metrics(tmp_path):
    from attnprobe import metrics

    answers = rows("T", 30)
    made = report(save(tmp_path, {"T": answers}), level=0.8, baseline="RAUQ", seed=3, **QUICK).to_frame()
    scores = pd.DataFrame([row.scores for row in answers])
    quality = [row.quality for row in answers]
    expected = metrics.compare(scores, quality, baseline="RAUQ", level=0.8, seed=3, **QUICK)
    pd.testing.assert_frame_equal(made[expected.columns], expected)


def test_means_over_tasks(tmp_path):
    answers = {task: rows(task, 40, seed) for seed, task in enumerate([*published.QA, *published.SUMMARIES])}
    made = report(save(tmp_path, answers), **QUICK)
    table, low, high = made.table(), made.table("low"), made.table("high")
    assert list(table.columns) == [*published.QA, *published.SUMMARIES, "QA mean", "summ. mean"]
    for mean, tasks in (("QA mean", published.QA), ("summ. mean", published.SUMMARIES)):
        assert np.allclose(table[mean], table[list(tasks)].mean(axis=1))
        assert (low[mean] <= table[mean]).all()
        assert (table[mean] <= high[mean]).all()
        # four independent tasks know their mean better than any one of them
        assert ((high - low)[mean] < (high - low)[list(tasks)].mean(axis=1)).all()
    difference = made.table("difference")
    assert np.allclose(difference.loc["RAUQ"], table.loc["RAUQ"] - table.loc["SAUQ"])
    assert made.table("answers")["QA mean"].isna().all()
    assert made.notices == ()


def test_the_interval_of_a_mean_holds_the_truth_as_often_as_it_says(tmp_path):
    # the mean of two tasks: its interval must be that of independent tasks, narrower by the root of two
    answers = {task: rows(task, 200, 7) for task in ("TriviaQA", "TruthfulQA")}
    made = report(save(tmp_path, answers), resamples=400, permutations=9)
    width = made.table("high") - made.table("low")
    ratio = width["QA mean"] / width[["TriviaQA", "TruthfulQA"]].mean(axis=1)
    assert ((ratio > 0.6) & (ratio < 0.85)).all()


def test_a_mean_of_some_tasks_says_so_and_stands_beside_nothing(tmp_path):
    answers = {task: rows(task) for task in ("short", "MMLU", "XSum")}
    made = report(save(tmp_path, answers, kinds={"short": "TriviaQA"}), **QUICK)
    assert [task for task in made.table().columns if "mean" in task] == ["QA mean"]
    assert "QA mean is that of short, MMLU: the published one is of TriviaQA, TruthfulQA, MMLU, CoQA." in made.notices
    beside = made.table("published")
    assert beside["QA mean"].isna().all()
    assert beside.loc["SAUQ", ["short", "MMLU", "XSum"]].tolist() == [0.2914, 0.5588, 0.4214]


def test_published_figures_stand_only_beside_the_same_metric(tmp_path):
    save(tmp_path, {"MMLU": rows("MMLU", binary=True)})
    assert report(tmp_path, **QUICK).to_frame()["published"].notna().all()
    assert report(tmp_path, max_rejection=1.0, **QUICK).to_frame()["published"].isna().all()
    assert report(tmp_path, metric="auroc", **QUICK).to_frame()["published"].isna().all()


def test_published_figures_go_by_what_a_method_is_and_not_by_its_label(tmp_path):
    configured = [
        {"name": "SAUQ", "label": "a", "measure": "counting"},
        {"name": "SAUQ", "label": "SAUQ", "alpha": 0.5},
        {"name": "RAUQ", "label": "b"},
        {"name": "SAUQ", "label": "c", "measure": "intrinsic"},
    ]
    methods = tuple(method["label"] for method in configured)
    answers = {task: rows(task, methods=methods) for task in published.QA}
    save(tmp_path, answers, methods=methods, config={"methods": configured})
    table = report(tmp_path, **QUICK).table("published")
    assert table["QA mean"].fillna(-1).tolist() == [0.3660, -1, 0.3677, 0.3831]
    assert table["MMLU"].fillna(-1).tolist() == [-1, -1, 0.5596, 0.5588]


def test_other_metrics(tmp_path):
    from attnprobe import metrics

    answers = rows("T", 30, binary=True)
    save(tmp_path, {"T": answers})
    wrong = [1 - row.quality for row in answers]
    for name in ("auroc", "average_precision"):
        found = report(tmp_path, metric=name, **QUICK).table()["T"]
        for method in METHODS:
            assert found[method] == getattr(metrics, name)([row.scores[method] for row in answers], wrong)
    with pytest.raises(ValueError, match="there is no metric 'f1': there are prr, auroc, average_precision"):
        report(tmp_path, metric="f1")


def test_a_graded_quality_has_no_auroc(tmp_path):
    made = report(save(tmp_path, {"T": rows("T"), "B": rows("B", 30, binary=True)}), metric="auroc", **QUICK)
    assert made.table()["T"].isna().all()
    assert made.table()["B"].notna().all()
    assert len(made.notices) == 1
    assert made.notices[0].startswith("T: auroc needs qualities of 0 or 1, and there is 0.")


def test_what_has_no_value_says_why(tmp_path):
    constant = [Row("C", f"q{i}", tokens=2, quality=1.0, scores=dict.fromkeys(METHODS, float(i))) for i in range(9)]
    save(tmp_path, {"C": constant, "few": rows("few", 2), "none": [], "T": rows("T")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = report(tmp_path, **QUICK)
    table = made.table()
    assert table[["C", "few", "none"]].isna().all().all()
    assert table["T"].notna().all()
    assert made.table("answers").loc["SAUQ"].tolist() == [9, 2, 0, 12]
    for task, said in (("C", "PRR is NaN"), ("C", "all lengths"), ("few", "too few"), ("none", "no answers yet")):
        assert any(notice.startswith(f"{task}: ") and said in notice for notice in made.notices), (task, said)
    assert "method" not in " ".join(made.notices)  # what is true of all is said once
    assert made.to_markdown()
    assert made.to_latex()


def test_an_infinite_score_is_the_least_certain(tmp_path):
    answers = [*rows("T"), Row("T", "inf", tokens=3, quality=0.0, scores=dict.fromkeys(METHODS, math.inf))]
    found = report(save(tmp_path, {"T": answers}), **QUICK).to_frame()
    assert found["value"].notna().all()
    assert found["length_correlation"].notna().all()


def test_settings_out_of_range(tmp_path):
    save(tmp_path, {"T": rows("T")})
    for wrong, said in (
        (dict(max_rejection=0), "max_rejection is 0"),
        (dict(max_rejection=1.1), "max_rejection is 1.1"),
        (dict(level=1.0), "level is 1.0"),
        (dict(baseline="SAUCE"), r"baseline 'SAUCE' is not among the methods \(SAUQ, RAUQ, Perplexity\)"),
    ):
        with pytest.raises(ValueError, match=said):
            report(tmp_path, **wrong)
    with pytest.raises(ValueError, match="at least one output"):
        report([])
    with pytest.raises(FileNotFoundError, match="holds no results"):
        report(tmp_path / "nowhere")


# --- several runs -----------------------------------------------------------------------------------------


def test_several_models(tmp_path):
    save(tmp_path / "a", {"T": rows("T"), "U": rows("U")}, model="one")
    save(tmp_path / "b", {"T": rows("T", seed=5)}, model="two", methods=("RAUQ",))
    save(tmp_path / "c", {"T": rows("T", seed=6)}, model="two")
    made = report([tmp_path / name for name in "abca"], **QUICK)
    models = list(made.to_frame()["model"].unique())
    assert models == ["one", f"two ({tmp_path / 'b'})", f"two ({tmp_path / 'c'})"]
    table = made.table()
    assert list(table.columns)[:2] == [("one", "T"), ("one", "U")]
    assert table[models[1], "T"].notna().to_dict() == {"SAUQ": False, "RAUQ": True, "Perplexity": False}
    titles = [section.title for section in made.sections()]
    assert sum("two" in title for title in titles) == 2
    assert made.to_frame().query("method == 'RAUQ'")["difference"].notna().tolist() == [True, True, False, True]


def test_the_rejection_is_that_of_the_runs(tmp_path):
    save(tmp_path / "a", {"T": rows("T")}, max_rejection=1.0)
    save(tmp_path / "b", {"T": rows("T")}, model="b")
    assert report(tmp_path / "a", **QUICK).settings.max_rejection == 1.0
    assert report(tmp_path / "b", **QUICK).settings.max_rejection == 0.5
    with pytest.raises(ValueError, match=r"different max_rejection \(0.5, 1.0\): name one"):
        report([tmp_path / "a", tmp_path / "b"])
    assert report([tmp_path / "a", tmp_path / "b"], max_rejection=0.4, **QUICK).settings.max_rejection == 0.4


def test_a_damaged_part_is_left_out_and_said(tmp_path):
    save(tmp_path, {"T": rows("T"), "U": rows("U")})
    (tmp_path / "rows" / "part-000002.parquet").write_bytes(b"")
    made = report(tmp_path, **QUICK)
    assert made.table("answers").loc["SAUQ"].tolist() == [12, 0]
    assert "1 damaged parts of" in made.notices[0]


# --- writing ----------------------------------------------------------------------------------------------

HOSTILE = "a|b_*[x](y)<i>&\\%$#{}~^\n\x1b[2J\u202e日本`"


def hostile_report(tmp_path):
    methods = ("SAUQ", HOSTILE)
    answers = {"T": rows("T", methods=methods), HOSTILE: rows(HOSTILE, methods=methods)}
    return report(save(tmp_path, answers, methods=methods, model=HOSTILE), **QUICK)


def test_csv_reads_back_in_full_precision(tmp_path):
    made = hostile_report(tmp_path / "out")
    text = made.to_csv(tmp_path / "report.csv")
    assert (tmp_path / "report.csv").read_bytes().decode() == text
    found = pd.read_csv(io.StringIO(text), lineterminator="\n")
    pd.testing.assert_frame_equal(found, made.to_frame(), check_dtype=False)


def cells(line: str) -> list[str]:
    """The cells of a line of a pipe table, as Markdown reads it."""
    found, current, escaped = [], "", False
    for character in line.strip():
        if escaped:
            current, escaped = current + character, False
        elif character == "\\":
            escaped = True
        elif character == "|":
            found.append(current.strip())
            current = ""
        else:
            current += character
    return found[1:]


def test_markdown_reads_back(tmp_path):
    made = hostile_report(tmp_path / "out")
    text = made.to_markdown(tmp_path / "report.md")
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == text
    assert "\x1b" not in text
    assert "\u202e" not in text
    shown = HOSTILE.replace("\n", "\\n").replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| method"))
    assert cells(lines[start]) == ["method", "T", shown]
    assert [cells(line)[0] for line in lines[start + 2 : start + 4]] == ["SAUQ", shown]
    value = made.table().loc["SAUQ", "T"]
    assert cells(lines[start + 2])[1].startswith(f"{value:.3f} [")
    for line in lines[start : start + 4]:
        assert len(cells(line)) == 3
    assert lines[0].startswith("### Prediction rejection ratio of a\\|b\\_\\*\\[x\\]")


def test_latex_escapes_everything(tmp_path):
    text = hostile_report(tmp_path / "out").to_latex(tmp_path / "report.tex")
    assert (tmp_path / "report.tex").read_text(encoding="utf-8") == text
    shown = (
        r"a\textbar{}b\_*[x](y)\textless{}i\textgreater{}\&\textbackslash{}\%\$\#\{\}\textasciitilde{}"
        r"\textasciicircum{}\textbackslash{}n\textbackslash{}x1b[2J\textbackslash{}u202e日本`"
    )
    assert f"method & T & {shown} \\\\" in text
    assert f"\n{shown} & " in text
    assert text.count("{") == text.count("}")
    for table in text.split("\\end{table}")[:-1]:
        body = table.split("\\toprule\n")[1].split("\\bottomrule")[0]
        columns = {line.replace(r"\&", "").count("&") for line in body.splitlines() if line.endswith("\\\\")}
        assert len(columns) == 1


def test_negative_numbers_in_latex_have_a_minus(tmp_path):
    frame = pd.DataFrame({"a": ["-0.050 [-0.100, 0.020]"], "p-b": ["+0.1"]}, index=pd.Index(["x-1"], name="method"))
    text = latex(Section("T-1", frame))
    assert "x-1 & $-$0.050 [$-$0.100, 0.020] & +0.1 \\\\" in text
    assert "method & a & p-b" in text
    assert "| x-1 | -0.050 [-0.100, 0.020] | +0.1 |" in markdown(Section("T-1", frame))


def test_the_sections_of_a_report(tmp_path):
    answers = {task: rows(task) for task in ("MMLU", "XSum")}
    made = report(save(tmp_path, answers), **QUICK)
    value, difference, length, counted, beside = made.sections()
    assert value.title == "Prediction rejection ratio of tiny, with 90 % intervals"
    assert list(difference.frame.index) == ["RAUQ", "Perplexity"]
    assert "p = " in difference.frame.iloc[0, 0]
    assert length.frame.shape == (3, 2)
    assert counted.frame.loc["MMLU", ["answers", "failed"]].tolist() == ["12", "0"]
    assert beside.title == "Published for LLaMA-3.1-8B ([SG] arXiv 2610.06012)"
    assert beside.frame.loc["SAUQ"].tolist() == ["0.5588", "0.4214"]
    assert "another model than tiny" in beside.notes[0]
    assert len(beside.notes) == 1


def test_another_quality_than_the_published_one_is_said(tmp_path):
    qualities = {"MMLU": "exact_match", "XSum": "rouge_l", "mine": "contains"}
    tasks = [{"label": task, "task": task, "quality": quality} for task, quality in qualities.items()]
    made = report(save(tmp_path, {task: rows(task) for task in qualities}, config={"tasks": tasks}), **QUICK)
    assert made.sections()[-1].notes[1] == "Measured there by AlignScore, MMLU by exact match; here XSum by rouge_l."
    assert made.table("measured_by").loc["SAUQ"].to_dict() == qualities


# --- published figures ------------------------------------------------------------------------------------


def test_published_means_are_those_of_their_tasks():
    table = published.published_methods()
    assert table.shape == (10, 8)
    off = (table[list(published.QA)].mean(axis=1) - table["QA mean"]).abs()
    assert off.drop("LogDetRAUQ").max() < 1e-4
    assert 3.9e-4 < off["LogDetRAUQ"] < 4.1e-4  # so the source has it
    assert (table[list(published.SUMMARIES)].mean(axis=1) - table["summ. mean"]).abs().max() < 1e-4
    measures = published.published_measures()
    assert measures.loc["SAUQ-intrinsic"].tolist() == table.loc["SAUQ", ["QA mean", "summ. mean"]].tolist()
    assert table.attrs["source"] == measures.attrs["source"] == "[SG] arXiv 2610.06012"
    assert published.published("SAUQ-counting", "QA mean") == 0.3660
    assert math.isnan(published.published("SAUQ-counting", "MMLU"))


def test_published_methods_are_methods_of_ours():
    from attnprobe.uncertainty.registry import method_names

    assert set(published.published_methods().index) <= set(method_names())
    assert set(published.published_measures().index) - {"SAUQ-intrinsic"} <= set(method_names())
