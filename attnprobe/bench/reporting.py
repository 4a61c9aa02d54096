"""From results to tables: methods by tasks, with intervals, a comparison, and the published figures beside."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnprobe.bench import published
from attnprobe.bench.ranking import FIGURES, METRICS, Settings, mean_rank, rank
from attnprobe.bench.store import Record, read_asked, read_record, read_rows
from attnprobe.bench.tables import Section, latex, markdown

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_BASELINE = "SAUQ"
_MEANS = {published.QA_MEAN: published.QA, published.SUMMARY_MEAN: published.SUMMARIES}
_COUNTS = ("answers", "failed", "quality", "tokens", "prompt_tokens", "seconds")
_KEYS = ("model", "task", "method")


@dataclass(frozen=True, eq=False)
class Report:
    """Figures of one run or several.

    Attributes:
        settings: how methods are ranked.
        notices: what has no value or was left out, a sentence each.
    """

    settings: Settings
    notices: tuple[str, ...]
    _figures: pd.DataFrame
    _tasks: pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        """Every figure, a row for each model, task and method.

        Returns:
            A DataFrame with the columns

            - model, task, method;
            - value, low, high: of the metric, and its interval;
            - difference, difference_low, difference_high, p, p_holm: to the baseline, as `metrics.compare` has them;
            - length_correlation: Spearman's, of the score with the number of tokens of the answer;
            - published: the figure of another model, where there is one;
            - answers, failed: how many rows count, and how many do not because they failed;
            - quality, tokens, prompt_tokens, seconds: means over the answers;
            - measured_by: what the quality is.

            The tasks "QA mean" and "summ. mean" are means over the tasks of their kind that are there.
        """
        return self._figures.merge(self._tasks, on=["model", "task"], how="left", validate="many_to_one")

    def table(self, column: str = "value") -> pd.DataFrame:
        """One column of `to_frame`, methods by models and tasks (by tasks alone, where there is one model)."""
        frame = self.to_frame()
        keys = frame[["model", "task"]].drop_duplicates()
        wide = frame.pivot(index="method", columns=["model", "task"], values=column)
        wide = wide.reindex(index=frame["method"].unique(), columns=list(keys.itertuples(index=False, name=None)))
        return wide.droplevel("model", axis=1) if frame["model"].nunique() == 1 else wide

    def sections(self) -> list[Section]:
        """The tables of the report as text."""
        frame = self.to_frame()
        return [section for model, one in frame.groupby("model", sort=False) for section in self._of_model(model, one)]

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """`to_frame` as CSV text in full precision, written to a file too if one is named."""
        return _written(self.to_frame().to_csv(index=False, lineterminator="\n"), path)

    def to_markdown(self, path: str | os.PathLike[str] | None = None) -> str:
        """The tables as Markdown, written to a file too if one is named."""
        return _written("\n".join(map(markdown, self.sections())), path)

    def to_latex(self, path: str | os.PathLike[str] | None = None) -> str:
        """The tables as LaTeX (with the package booktabs), written to a file too if one is named."""
        return _written("\n".join(map(latex, self.sections())), path)

    def _of_model(self, model: Any, frame: pd.DataFrame) -> Iterable[Section]:
        percent = f"{100 * self.settings.level:g} %"
        name = METRICS[self.settings.metric]
        below = ["Higher = the method ranks answers better; 0 is chance, 1 an oracle."]
        if self.settings.metric == "prr":
            below.append(f"At most {100 * self.settings.max_rejection:g} % of the answers are rejected.")
        yield Section(f"{name} of {model}, with {percent} intervals", _cells(frame, _value), [" ".join(below)])
        if frame["difference"].notna().any():
            yield Section(
                f"Difference from {self.settings.baseline}, with {percent} intervals and p-values",
                _cells(frame[frame["method"] != self.settings.baseline], _difference),
                ["p-values are of a paired permutation test, corrected (Holm) for the number of methods."],
            )
        tasks = frame[frame["answers"].notna()]
        yield Section("Spearman correlation of the score with the length of the answer", _cells(tasks, _correlation))
        yield Section("Answers", _counted(tasks))
        if frame["published"].notna().any():
            yield Section(
                f"Published for {published.MODEL} ({published.SOURCE})",
                _cells(frame[frame["published"].notna()], _published).reindex(_methods_beside(frame)),
                [
                    f"Prediction rejection ratios of another model than {model}: to compare with, not to reach.",
                    *_other_qualities(tasks),
                ],
            )


def report(
    outputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    max_rejection: float | None = None,
    level: float = 0.9,
    metric: str = "prr",
    baseline: str | None = None,
    resamples: int = 1000,
    permutations: int = 999,
    seed: int = 0,
) -> Report:
    """Rank the methods of finished (or unfinished) runs. Rows that failed are counted and left out.

    Args:
        outputs: output folders, one or many; each model of them gets its tables.
        max_rejection: the largest fraction of answers to reject; by default that of the runs, 0.5 if they do not say.
        level: of the bootstrap intervals.
        metric: "prr"; or "auroc" or "average_precision" of finding the answers of quality 0, where all are 0 or 1.
        baseline: the method that all others are compared with; SAUQ by default, where it is there.
        resamples, permutations, seed: of the intervals and of the paired tests.

    Returns:
        `Report`.

    Raises:
        ValueError: no folder, a damaged one, a baseline that no run has, runs of different max_rejection without one
            given, or a setting out of range.
        FileNotFoundError: a folder is not there, or holds no results.
    """
    import pandas as pd

    folders = [outputs] if isinstance(outputs, str | os.PathLike) else list(outputs)
    if not folders:
        raise ValueError("there is nothing to report on: name at least one output folder.")
    runs = [_read(Path(folder)) for folder in dict.fromkeys(os.fspath(folder) for folder in folders)]
    settings = Settings(
        metric=metric,
        max_rejection=_max_rejection(runs) if max_rejection is None else max_rejection,
        level=level,
        baseline=_baseline(runs, baseline),
        resamples=resamples,
        permutations=permutations,
        seed=seed,
    )
    figures, counts, notices = [], [], []
    for name, one in zip(_names(runs), runs, strict=True):
        found, counted, said = _figures(one, settings)
        figures.append(found.assign(model=name))
        counts.append(counted.assign(model=name))
        notices += said
    all_figures = pd.concat(figures, ignore_index=True)[[*_KEYS, *FIGURES, "length_correlation", "published"]]
    return Report(settings, tuple(notices), all_figures, pd.concat(counts, ignore_index=True))


# --- computing --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Run:
    folder: Path
    record: Record
    rows: pd.DataFrame
    damaged: int
    asked: dict[str, int]

    def missing(self, task: str) -> str | None:
        """A sentence about a task that is not done; None where it is."""
        there, asked = int((self.rows["task"] == task).sum()), self.asked.get(task, 0)
        if there >= asked:
            return None
        return (
            f"{task}: {there} of {asked} rows are there. The longest prompts are asked first, so that these are not "
            "like all: run it to its end."
        )

    def answers(self, task: str) -> pd.DataFrame:
        return self.rows[(self.rows["task"] == task) & self.rows["error"].isna()]

    @property
    def kinds(self) -> dict[str, str]:
        """label -> the name of the task, as it was configured."""
        configured = self.record.config.get("tasks", [])
        kinds = {task.get("label"): task.get("task") for task in configured}
        return {label: str(kinds.get(label) or label) for label in self.record.tasks}

    @property
    def qualities(self) -> dict[str, str | None]:
        """label -> the name of its quality."""
        said = {task.get("label"): task.get("quality") for task in self.record.config.get("tasks", [])}
        return {label: said.get(label) for label in self.record.tasks}

    @property
    def published_names(self) -> list[str]:
        """What the publication calls each method."""
        configured = self.record.config.get("methods") or [{}] * len(self.record.methods)
        return [_published_name(*pair) for pair in zip(self.record.methods, configured, strict=True)]


def _published_name(method: str, configured: dict[str, Any]) -> str:
    """What the publication calls a method: a label may be anything, and with other settings it is another method.

    >>> _published_name("mine", {"name": "SAUQ", "label": "mine", "measure": "counting"})
    'SAUQ-counting'
    """
    options = {key: value for key, value in configured.items() if key not in ("name", "label")}
    name = str(configured.get("name", method))
    if name == "SAUQ" and set(options) == {"measure"}:
        return name if options["measure"] == "intrinsic" else f"{name}-{options['measure']}"
    return "" if options else name


def _read(folder: Path) -> _Run:
    record = read_record(folder)
    found = read_rows(folder)
    return _Run(folder, record, found.frame(record.methods), len(found.damaged), read_asked(folder))


def _figures(run: _Run, settings: Settings) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    import pandas as pd

    methods, notices = run.record.methods, []
    if run.damaged:
        notices.append(f"{run.damaged} damaged parts of {run.folder} are left out: start the run again to redo them.")
    tables, counts = [], []
    for task, kind in run.kinds.items():
        table, said = rank(run.answers(task), methods, settings)
        notices += [sentence for sentence in [run.missing(task)] if sentence is not None]
        notices += [f"{task}: {sentence}" for sentence in said]
        tables.append(table.assign(task=task, published=_beside(run, kind, settings)))
        counts.append(_counts(run, task))
    for mean, kinds in _MEANS.items():
        tasks = [task for task, kind in run.kinds.items() if kind in kinds]
        if len(tasks) > 1 and mean not in run.kinds:
            table, said = mean_rank([run.answers(task) for task in tasks], methods, settings)
            notices += [f"{mean}: {sentence}" for sentence in said]
            whole = sorted(run.kinds[task] for task in tasks) == sorted(kinds)
            if not whole:
                notices.append(f"{mean} is that of {', '.join(tasks)}: the published one is of {', '.join(kinds)}.")
            tables.append(table.assign(task=mean, published=_beside(run, mean if whole else "", settings)))
    return pd.concat(tables, ignore_index=True), pd.DataFrame(counts), notices


def _counts(run: _Run, task: str) -> dict[str, Any]:
    answers = run.answers(task)
    means = {name: answers[name].mean() for name in _COUNTS[2:]}
    failed = int((run.rows["task"] == task).sum()) - len(answers)
    return {"task": task, "answers": len(answers), "failed": failed, **means, "measured_by": run.qualities[task]}


def _beside(run: _Run, column: str, settings: Settings) -> list[float]:
    """The published figure of each method of a run, where it is one of the same method and the same metric."""
    same = settings.metric == "prr" and settings.max_rejection == published.MAX_REJECTION
    return [published.published(name, column) if same else float("nan") for name in run.published_names]


def _max_rejection(runs: Sequence[_Run]) -> float:
    said = sorted({float(run.record.config.get("max_rejection", published.MAX_REJECTION)) for run in runs})
    if len(said) > 1:
        raise ValueError(f"the runs have different max_rejection ({', '.join(map(str, said))}): name one.")
    return said[0]


def _baseline(runs: Sequence[_Run], asked: str | None) -> str | None:
    methods = list(dict.fromkeys(method for run in runs for method in run.record.methods))
    if asked is None:
        return DEFAULT_BASELINE if DEFAULT_BASELINE in methods else None
    if asked not in methods:
        raise ValueError(f"the baseline {asked!r} is not among the methods ({', '.join(methods)}).")
    return asked


def _names(runs: Sequence[_Run]) -> list[str]:
    """The models, with the folder where two runs are of the same."""
    # A local model is a path, of which the last part says which.
    short = [Path(run.record.model).name if Path(run.record.model).is_absolute() else run.record.model for run in runs]
    times = Counter(short)
    return [name if times[name] == 1 else f"{name} ({run.folder})" for name, run in zip(short, runs, strict=True)]


# --- writing ----------------------------------------------------------------------------------------------


def _cells(frame: pd.DataFrame, cell: Callable[[Any], str]) -> pd.DataFrame:
    """Methods by tasks, a text each."""
    texts = frame.assign(cell=[cell(row) for row in frame.itertuples(index=False)])
    wide = texts.pivot(index="method", columns="task", values="cell")
    wide = wide.reindex(index=frame["method"].unique(), columns=frame["task"].unique(), fill_value="-")
    wide.columns.name = None
    return wide.fillna("-")


def _methods_beside(frame: pd.DataFrame) -> list[str]:
    """The methods with a published figure, in the order of the run."""
    beside = set(frame.loc[frame["published"].notna(), "method"])
    return [method for method in frame["method"].unique() if method in beside]


def _other_qualities(frame: pd.DataFrame) -> list[str]:
    """A sentence, where the quality is another than behind the published figures."""
    tasks = frame[frame["published"].notna()].drop_duplicates("task").set_index("task")["measured_by"].dropna()
    other = [f"{task} by {name}" for task, name in tasks.items() if name not in published.QUALITIES]
    return [f"Measured there by AlignScore, MMLU by exact match; here {', '.join(other)}."] if other else []


def _value(row: Any) -> str:
    return f"{_number(row.value)} {_interval(row.low, row.high)}".strip()


def _difference(row: Any) -> str:
    p = "" if _is_nan(row.p_holm) else f", p = {row.p_holm:.3f}"
    return f"{_number(row.difference, '+')} {_interval(row.difference_low, row.difference_high)}".strip() + p


def _correlation(row: Any) -> str:
    return _number(row.length_correlation, digits=2)


def _published(row: Any) -> str:
    return _number(row.published, digits=4)


def _counted(frame: pd.DataFrame) -> pd.DataFrame:
    table = frame.drop_duplicates("task").set_index("task")
    columns = {
        "answers": ("answers", partial(_number, digits=0)),
        "failed": ("failed", partial(_number, digits=0)),
        "quality": ("mean quality", _number),
        "tokens": ("tokens", partial(_number, digits=1)),
        "prompt_tokens": ("prompt tokens", partial(_number, digits=1)),
        "seconds": ("seconds", _number),
    }
    return (
        table[list(columns)]
        .apply(lambda column: column.map(columns[column.name][1]))
        .rename(columns={name: title for name, (title, _) in columns.items()})
    )


def _interval(low: float, high: float) -> str:
    return "" if _is_nan(low) else f"[{_number(low)}, {_number(high)}]"


def _number(value: float, sign: str = "", digits: int = 3) -> str:
    return "-" if _is_nan(value) else f"{value:{sign}.{digits}f}"


def _is_nan(value: float) -> bool:
    return value != value


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    return text
