"""A polarity study from data sets to tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnprobe.polarity.answers import answers_of, chosen
from attnprobe.polarity.features import Features, features_of
from attnprobe.polarity.report import PolarityStudy
from attnprobe.polarity.reversal import Reversal
from attnprobe.polarity.sources import Source, SourceSettings, source_of
from attnprobe.polarity.study import StudySettings, polarity_of

Data = str | SourceSettings | Source


def polarity_study(
    model: Any,
    data: Data | Sequence[Data],
    *,
    out: str | os.PathLike[str],
    questions: int | None = None,
    max_tokens: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    settings: StudySettings | None = None,
    rows: str = "error",
    model_name: str | None = None,
    progress: bool = True,
    tokenizer: Any = None,
) -> PolarityStudy:
    """Read labelled answers of one data set or two, and see which way transport features point on hallucinated ones.

    The model reads prompt and answer; nothing is generated. Features are kept under `out`, a folder a data set, and a
    call that was interrupted goes on after the answers that are there.

    Args:
        model: what `load_model` gives; host="transformers" is the quickest.
        data: what `attnprobe.polarity.source_of` takes: a recipe (`attnprobe.polarity.recipe_names()`), "RECIPE=FILE",
            a file, a YAML file, or settings; two of them are compared with each other.
        out: the folder of features and results.
        questions: at most so many questions of each data set, drawn by seed; all answers of a question are read.
        max_tokens: prompt and answer together; longer prompts lose their middle, which is counted. 1024 by default, or
            what the model reads if that is less.
        batch_size: answers a forward.
        seed: of the questions drawn; that of resamples and permutations is in `settings`.
        settings: of the statistics; by default `StudySettings(seed=seed)`.
        rows: policy for models whose rows do not sum to 1, as in `Probe`.
        model_name: what the record calls the model.
        progress: bars on standard error, if that is a terminal.
        tokenizer: used instead of `model.tokenizer`.

    Returns:
        `PolarityStudy`, which is written to `out` too.

    Raises:
        ValueError, TypeError: data that cannot be read, or settings out of range, in one sentence.
        RuntimeError: another run holds the folder.
        OSError: results cannot be written.
        ImportError: the extra packages are not installed.

    Example::

        model = attnprobe.load_model(host="transformers")
        study = attnprobe.polarity_study(model, ["halueval_qa", "medhallu"], out="polarity", questions=150)
        study.reversal.table

    Source: [ST] arXiv 2605.04893.
    """
    sources = check_sources([data] if isinstance(data, str | SourceSettings | Source) else data)
    check_questions(questions)
    settings = settings or StudySettings(seed=seed)
    features: list[Features] = []
    folder = Path(out)
    for source, answers in [(source, answers_of(source)) for source in sources]:
        features.append(
            features_of(
                model,
                answers,
                label=source.label,
                folder=folder / source.label,
                chosen=chosen(answers, questions, seed),
                model_name=model_name,
                max_tokens=max_tokens,
                batch_size=batch_size,
                rows=rows,
                progress=progress,
                tokenizer=tokenizer,
            )
        )
    said = {
        "model": model_name or str(getattr(getattr(model, "config", None), "_name_or_path", "")),
        "data": [source.data for source in sources],
        "questions": questions,
        "max_tokens": max_tokens,
        "seed": seed,
        **vars(settings),
    }
    study = study_of(features, settings, said)
    study.write(folder)
    return study


def study_of(
    features: Sequence[Features], settings: StudySettings | None = None, said: dict[str, Any] | None = None
) -> PolarityStudy:
    """The study of features that are there.

    Args:
        features: of one data set or two.
        settings: of the statistics.
        said: how the features were made, for the record.

    Raises:
        ValueError: as `polarity_of`.
    """
    found = tuple(polarity_of(one, settings) for one in features)
    reversal = Reversal(*found) if len(found) == 2 else None
    return PolarityStudy(found, reversal, said or {}, tuple(_notices(features)))


def check_sources(data: Sequence[Data]) -> list[Source]:
    """The sources of one data set or two.

    Raises:
        ValueError: none, more than two, one that is not known, or two of one label.
    """
    if not 1 <= len(data) <= 2:
        raise ValueError(f"there are {len(data)} data sets: give one, or two to compare.")
    sources = [source_of(one) for one in data]
    if len({source.label for source in sources}) < len(sources):
        raise ValueError(
            f"both data sets are called {sources[0].label!r}: give one of them another label, in a YAML file."
        )
    return sources


def check_questions(questions: int | None) -> None:
    """Whether so many questions can be asked for.

    Raises:
        ValueError: fewer than two.
    """
    if questions is not None and questions < 2:
        raise ValueError(f"{questions} questions: give at least two, as answers are compared.")


def _notices(features: Sequence[Features]) -> list[str]:
    said = []
    for one in features:
        if one.truncated:
            said.append(f"{one.label}: {one.truncated} of {len(one.answers)} answers were read after a cut prompt.")
        if one.failed:
            name, why = next(iter(one.failed.items()))
            said.append(f"{one.label}: {len(one.failed)} answers were left out; {name}: {why}.")
        labels = one.answers.groupby("group")["label"].agg(["size", "nunique"])
        alike = int(((labels["size"] > 1) & (labels["nunique"] == 1)).sum())
        if alike:
            said.append(
                f"{one.label}: {alike} questions have several answers of one label, which p-values take for "
                "independent of one another: they may be too small."
            )
    return said
