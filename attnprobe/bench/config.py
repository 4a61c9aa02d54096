"""The configuration of a benchmark run: what a YAML file may say, checked before a model is loaded for nothing."""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from attnprobe.bench.builtin import BUILT_IN
from attnprobe.bench.config_errors import Location, first_sentence, nearest
from attnprobe.bench.config_paths import anchored
from attnprobe.bench.data import check_source, is_file_name
from attnprobe.bench.extra import need
from attnprobe.bench.methods import build_method
from attnprobe.bench.prompts import Template, check_item_template
from attnprobe.bench.quality import QUALITIES, WITH_ALIGNSCORE, WITHOUT_A_MODEL, Quality, quality_function
from attnprobe.bench.store import check_methods
from attnprobe.bench.yaml_file import read_yaml
from attnprobe.uncertainty.registry import AnyMethod

need("pydantic")  # one sentence where it is missing
from pydantic import (  # noqa: E402
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

Text = Annotated[str, Field(strict=True)]
Name = Annotated[str, Field(strict=True, min_length=1)]
Count = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]
Switch = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]

# Our names of what a row may hold. A task of one's own may add others: those that its template names.
ROW_NAMES = (
    "id",
    "question",
    "context",
    "references",
    "choices",
    "answer",
    "subject",
    "document",
    "dialogue",
    "story",
    "questions",
    "answers",
)
_SOURCE_KEYS = ("data", "subset", "split", "shots_data", "shots_subset", "shots_split", "shuffle_seed")
# Here nothing is a value: all rows, in their order, with the run's own choice.
_MAY_BE_NOTHING = ("subset", "split", "limit", "shuffle_seed", "max_per_subject", "chat")
_SETTLED = ConfigDict(frozen=True, extra="forbid")


class MethodConfig(BaseModel):
    """A score with settings of its own: `{name: SAUQ, measure: counting, label: "SAUQ counting"}`.

    Attributes:
        name: as in `attnprobe.uncertainty.method_names()`, or "module:Class".
        label: how it is called in the results; the method's own name by default.

    Every other key is an argument of the method.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    name: Name
    label: Name | None = None

    @model_validator(mode="after")
    def _can_be_made(self) -> MethodConfig:
        for option, value in self.options.items():
            values = value if isinstance(value, list | tuple) else [value]
            if not all(item is None or isinstance(item, str | int | float) for item in values):
                raise ValueError(f"the option {option!r} is {reprlib.repr(value)}: use text, numbers or a list of them")
        self.build()  # says what is wrong now, not when the model is there
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the method that were given."""
        return dict(self.model_extra or {})

    def build(self) -> AnyMethod:
        """The method itself.

        Raises:
            ValueError: an unknown name or option, or a value that the method refuses.
        """
        return build_method(self.name, self.options, self.label)


class AlignScoreConfig(BaseModel):
    """Where the weights of AlignScore are.

    Attributes:
        checkpoint: the published checkpoint file (AlignScore-large.ckpt or AlignScore-base.ckpt), fetched by hand.
        model: the RoBERTa that it was trained from: a hub name or a folder with config and tokenizer.
        batch_size: pairs of texts at once.
        device: "cpu" by default, so that the model that is measured keeps the accelerator for itself.
    """

    model_config = _SETTLED
    checkpoint: Path
    model: Name = "roberta-large"
    batch_size: Positive = 16
    device: Name = "cpu"


class TaskConfig(BaseModel):
    """A task: where its rows are, how a prompt is made of one, and how good an answer is.

    What is left out comes from the built-in task of that name, so that every setting has its value here. Where `data`
    is given, it is that data and nothing of the built-in source.

    Attributes:
        task: the name of a built-in task, or any other name for a task of one's own.
        label: how it is called in the results; `task` by default, and unique in a run.
        data: a JSONL, CSV or Parquet file, or the name of a data set on the hub.
        subset, split: which part of a data set on the hub.
        fields: our names (`id`, `question`, `references`, ...) -> the columns of this data; dots reach inside.
        limit: how many examples at most; None for all.
        offset: how many examples to leave out at the beginning.
        shuffle_seed: draws the examples at random; None takes them in order.
        max_per_subject: how many examples of one subject at most.
        shots: few-shot examples in front of every question.
        shots_data, shots_subset, shots_split: where they come from; without any, the first rows of the data itself.
        preamble: template of what is in front of the few-shot examples.
        template: template of one question; `{answer}` at its end is where a few-shot example has its answer.
        separator: between few-shot examples, and before the question.
        max_new_tokens, stop: where an answer ends.
        quality: one of `QUALITIES`, or "module:function".
        chat: put the prompt into the chat template; None does as the run does.
    """

    model_config = _SETTLED
    task: Name
    label: Name
    data: Name
    subset: Text | None = None
    split: Text | None = None
    fields: dict[Text, Name] = Field(default_factory=dict)
    limit: Positive | None = None
    offset: Count = 0
    shuffle_seed: Seed | None = None
    max_per_subject: Positive | None = None
    shots: Count = 0
    shots_data: Name | None = None
    shots_subset: Text | None = None
    shots_split: Text | None = None
    preamble: Text = ""
    template: Name
    separator: Text = "\n"
    max_new_tokens: Positive = 20
    stop: tuple[Name, ...] = ("\n",)
    quality: Name
    chat: Switch | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_built_in(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or not isinstance(given.get("task"), str):
            return given
        said = {key: value for key, value in given.items() if value is not None or key in _MAY_BE_NOTHING}
        built_in = BUILT_IN.get(said["task"])
        if built_in is None:
            _check_custom(said)
            return {"label": said["task"], **said}
        source = {} if "data" in said else built_in.source
        return {"label": said["task"], **source, **built_in.settings, **said}

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given

    @field_validator("quality")
    @classmethod
    def _known_quality(cls, name: str) -> str:
        if name not in QUALITIES and ":" not in name:
            near = nearest(name, QUALITIES)
            hint = f"did you mean {near!r}? " if near else ""
            raise ValueError(
                f"there is no quality {name!r}: {hint}there are {', '.join(QUALITIES)}, and a function of your own as "
                "'module:function'"
            )
        return name

    @field_validator("label")
    @classmethod
    def _printable(cls, label: str) -> str:
        # A label names columns and files of the results.
        if not label.isprintable() or label != label.strip() or set(label) & set("/\\"):
            raise ValueError(f"{label!r} is no label: use printable characters without slashes")
        return label

    @model_validator(mode="after")
    def _fits_together(self) -> TaskConfig:
        item, preamble = check_item_template(self.template), Template(self.preamble)
        known = {*ROW_NAMES, *self.fields}
        for template in (item, preamble):
            template.check_names(known)
        if "answer" in preamble.names:
            raise ValueError("the preamble has {answer}, which would give the answer away")
        used = {*item.names, *preamble.names}
        for name in self.fields:
            if name not in ROW_NAMES and name not in used:
                near = nearest(name, ROW_NAMES)
                hint = f"did you mean {near!r}?" if near else f"there are {', '.join(ROW_NAMES)}"
                raise ValueError(f"fields names {name!r}, which nothing reads: {hint}")
        if self.shots and self.conversation:
            raise ValueError("shots is given for a conversation, whose earlier turns stand in front of every question")
        if self.shots == 0 and (self.shots_data or (self.shots_split and self.task not in BUILT_IN)):
            raise ValueError("shots_data or shots_split is given and shots is 0: say how many")
        check_source(self.data, self.subset, self.split)
        if self.shots_data is not None:
            check_source(self.shots_data, self.shots_subset, self.shots_split, "shots_")
        elif self.shots_split is not None and is_file_name(self.data):
            raise ValueError(f"shots_split is given, and {self.data!r} is a file, which has no splits: use shots_data")
        return self

    @property
    def conversation(self) -> bool:
        """A row is a story with many turns, each of which is an example."""
        return self.task == "CoQA" or "questions" in self.fields

    def columns(self, name: str) -> tuple[str, ...]:
        """The columns that may hold what we call `name`; a row is read from the first that it has."""
        if name in self.fields:
            return (self.fields[name],)
        built_in = BUILT_IN.get(self.task)
        return built_in.columns.get(name, (name,)) if built_in else (name,)


class RunConfig(BaseModel):
    """A benchmark run.

    Attributes:
        model: a hub name or a local folder; None for the embedded model.
        host, dtype, device: as in `attnprobe.load_model`.
        chat: put prompts into the model's chat template.
        batch_size: prompts at once; changes no number.
        methods: the scores to compare.
        tasks: on what.
        output: the folder for the results.
        engine, workers: in this process, or spread with Ray.
        seed: draws few-shot examples, and whatever else is drawn.
        max_rejection: which part of the rejection curve counts.
        data_folder: where relative paths of data begin; the folder of the configuration file by default.
        alignscore: where AlignScore's weights are, if a task measures quality by it.
    """

    model_config = _SETTLED
    model: Name | None = None
    host: Literal["transformers", "transformer_lens"] = "transformers"
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    device: Name | None = None
    chat: Switch = False
    batch_size: Positive = 8
    methods: Annotated[tuple[MethodConfig, ...], Field(min_length=1)]
    tasks: Annotated[tuple[TaskConfig, ...], Field(min_length=1)]
    output: Path
    engine: Literal["local", "ray"] = "local"
    workers: Positive = 1
    seed: Seed = 0
    max_rejection: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.5
    data_folder: Path | None = None
    alignscore: AlignScoreConfig | None = None

    @field_validator("methods", mode="before")
    @classmethod
    def _names_are_methods(cls, given: Any) -> Any:
        if not isinstance(given, list | tuple):
            return given
        return tuple({"name": method} if isinstance(method, str) else method for method in given)

    @field_validator("methods")
    @classmethod
    def _methods_are_told_apart(cls, methods: tuple[MethodConfig, ...]) -> tuple[MethodConfig, ...]:
        names = [method.build().name for method in methods]
        twice = _twice(names)
        if twice is not None:
            raise ValueError(f"{twice!r} is there twice: give one of them a label")
        check_methods(names)
        return methods

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        twice = _twice([task.label for task in self.tasks])
        if twice is not None:
            raise ValueError(f"tasks has {twice!r} twice: give one of them another label")
        for task in self.tasks:
            if task.quality in WITH_ALIGNSCORE and self.alignscore is None:
                raise ValueError(
                    f"the task {task.label!r} measures quality by {task.quality}, and the file does not say where its "
                    "weights are: give `alignscore: {checkpoint: path/to/AlignScore-large.ckpt}`, or choose another "
                    f"quality for the task, one of {', '.join(WITHOUT_A_MODEL)}"
                )
        return self

    def quality_of(self, task: TaskConfig) -> Quality:
        """The function that measures the answers of a task; loads AlignScore where the task measures by it.

        Raises:
            ValueError: a function of one's own that cannot be had, or weights that cannot be read.
            ImportError: a package that the quality needs is not installed.
        """
        scorer = None
        if task.quality in WITH_ALIGNSCORE and self.alignscore is not None:
            from attnprobe.bench.alignscore import load_alignscore

            scorer = load_alignscore(**self.alignscore.model_dump())
        return quality_function(task.quality, alignscore=scorer)

    def fingerprint(self) -> str:
        """A hash of everything that changes the rows of the results.

        Where the results go and how the work is spread is not part of it, nor where a data file lies: what is in it is.
        AlignScore's weights, which are gigabytes, stand there by name and size.

        Raises:
            ValueError: a data file that cannot be read.
        """
        settings = self.model_dump(
            mode="json",
            exclude={
                "output": True,
                "engine": True,
                "workers": True,
                "batch_size": True,
                "device": True,
                "max_rejection": True,
                "data_folder": True,
                "alignscore": {"checkpoint", "batch_size", "device"},
            },
        )
        for task, said in zip(self.tasks, settings["tasks"], strict=True):
            said["columns"] = {name: task.columns(name) for name in ROW_NAMES}
            for key in ("data", "shots_data"):
                said[key] = _content(said[key])
        if self.alignscore is not None:
            settings["alignscore"]["checkpoint"] = _weights(self.alignscore.checkpoint)
        text = json.dumps(settings, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_config(path: str | os.PathLike[str], *, data_folder: str | os.PathLike[str] | None = None) -> RunConfig:
    """Read a configuration from a YAML file.

    Args:
        path: the file. Relative paths in it begin at its folder.
        data_folder: where relative paths of data files begin instead; overrides the file's own `data_folder`.

    Raises:
        ValueError: anything that is wrong with the file, in one sentence.
        ImportError: the extra packages of the benchmark are not installed.
    """
    path = Path(path)
    said = read_yaml(path)
    try:
        config = RunConfig.model_validate(said)
        return anchored(config, path.resolve().parent, data_folder)
    except ValidationError as error:
        raise ValueError(f"{str(path)!r}: {first_sentence(error, _keys_at)}") from None
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None


def _twice(names: list[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)


def _check_custom(said: Mapping[str, Any]) -> None:
    """A task that is not built in has to say what a built-in one knows.

    Raises:
        ValueError: it does not; the sentence names the built-in task that may have been meant.
    """
    lacking = [key for key in ("data", "template", "quality") if key not in said]
    if lacking:
        near = nearest(said["task"], BUILT_IN)
        hint = f"did you mean {near!r}? " if near else ""
        raise ValueError(
            f"there is no built-in task {said['task']!r}: {hint}there are {', '.join(BUILT_IN)}, and a task of your "
            f"own also needs {', '.join(lacking)}"
        )


def _keys_at(location: Location) -> Iterable[str]:
    """The keys that are valid where `location` has an unknown one."""
    models: dict[Any, type[BaseModel]] = {"tasks": TaskConfig, "alignscore": AlignScoreConfig}
    model = models.get(location[0], RunConfig) if len(location) > 1 else RunConfig
    return model.model_fields


def _content(name: str | None) -> str | None:
    """What stands for data in a fingerprint: of a file the hash of its bytes, of a data set on the hub its name."""
    if name is None or not is_file_name(name):
        return name
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"the data file {name!r} cannot be read: {error.strerror or error}") from None


def _weights(path: Path) -> list[str | int]:
    try:
        return [path.name, path.stat().st_size]
    except (OSError, ValueError):
        return [path.name]
