"""Which labelled answers to read, as the command line, a YAML file or a caller says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from attnprobe.bench.config_errors import first_sentence, nearest
from attnprobe.bench.data import Table, check_source, is_file_name, read_table
from attnprobe.bench.extra import need
from attnprobe.bench.prompts import Template
from attnprobe.bench.yaml_file import read_yaml
from attnprobe.polarity.recipes import NAMES, Recipe, recipe_names, recipe_of

_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class Source:
    """A data set of labelled answers.

    Attributes:
        label: what tables and folders call it.
        recipe: how its rows are read.
        data, subset, split: a file here, or a data set on the hub.
    """

    label: str
    recipe: Recipe
    data: str
    subset: str | None = None
    split: str | None = None

    def table(self) -> Table:
        """All rows as they are.

        Raises:
            ValueError: they cannot be read, or there are none.
            ImportError: a package that reading needs is not installed.
        """
        return read_table(self.data, self.subset, self.split)


@dataclass(frozen=True)
class SourceSettings:
    """What a YAML file may say, and `source_of` takes; everything may be left out but the data or a recipe that has it.

    Attributes:
        recipe: a name of `recipe_names()`; "plain" by default.
        data: a file (JSONL, CSV, Parquet) or the name of a data set on the hub; the recipe's own by default.
        subset, split: of a data set on the hub.
        label: what to call it; by default the recipe, or the file of the plain one.
        fields: our name -> column, instead of the recipe's (dots reach inside of one).
        template: the prompt, instead of the recipe's.
    """

    recipe: str = "plain"
    data: str | None = None
    subset: str | None = None
    split: str | None = None
    label: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None


def source_of(said: str | SourceSettings | Source) -> Source:
    """The source that a user names.

    Args:
        said: `RECIPE` (its data set on the hub), `RECIPE=FILE`, a file with columns of our names, a YAML file with
            the keys of `SourceSettings`; or settings as such.

    Raises:
        ValueError: it names none.

    >>> source_of("medhallu=rows.jsonl").data, source_of("halueval_qa").subset, source_of("mine.csv").recipe.name
    ('rows.jsonl', 'qa', 'plain')
    """
    if isinstance(said, Source):
        return said
    if isinstance(said, SourceSettings):
        return _settled(said)
    if PurePath(said).suffix.lower() in _YAML:
        return _settled(_read_settings(Path(said)))
    name, equals, data = said.partition("=")
    if equals and name in recipe_names():
        return _settled(SourceSettings(recipe=name, data=data))
    if is_file_name(said):
        return _settled(SourceSettings(data=said))
    if equals or "/" not in said:
        recipe_of(name)  # says which recipes there are
        return _settled(SourceSettings(recipe=name))
    raise ValueError(
        f"{said!r} is neither a recipe ({', '.join(recipe_names())}) nor a file of answers; a data set of the hub is "
        "described in a YAML file with recipe or fields, data and split"
    )


def _settled(said: SourceSettings) -> Source:
    recipe = recipe_of(said.recipe)
    unknown = sorted(set(said.fields) - set(NAMES))
    if unknown:
        raise ValueError(f"fields has {unknown[0]!r}, which is no name of ours: there are {', '.join(NAMES)}")
    template = recipe.template if said.template is None else said.template
    Template(template).check_names(("prompt", "question", "context"))
    recipe = replace(
        recipe, template=template, columns={**recipe.columns, **{name: (c,) for name, c in said.fields.items()}}
    )
    if said.data is None and recipe.data is None:
        raise ValueError(f"the recipe {recipe.name!r} is of no data set on the hub: give a file, {recipe.name}=FILE")
    own = said.data is None
    data = recipe.data if own else said.data
    assert data is not None
    subset, split = (said.subset or recipe.subset, said.split or recipe.split) if own else (said.subset, said.split)
    check_source(data, subset, split)
    label = said.label or (recipe.name if recipe.name != "plain" else PurePath(data).stem)
    if not label.replace("-", "").replace("_", "").replace(".", "").isalnum() or label.startswith("."):
        raise ValueError(f"the label {label!r} names a folder too: use letters, digits, '-', '_' and '.'")
    return Source(label, recipe, data, subset, split)


def _read_settings(path: Path) -> SourceSettings:
    pydantic = need("pydantic")
    said: dict[str, Any] = read_yaml(path)
    keys = SourceSettings.__dataclass_fields__
    for key in said:
        if key not in keys:
            near = nearest(key, keys)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(keys)}"
            raise ValueError(f"{str(path)!r} has an unknown key {key!r}: {hint}")
    try:
        settings: SourceSettings = pydantic.TypeAdapter(SourceSettings).validate_python(said)
    except pydantic.ValidationError as error:
        raise ValueError(f"{str(path)!r}: {first_sentence(error, lambda _: keys)}") from None
    if settings.data is not None and is_file_name(settings.data):
        # As a file says it: from where the file is.
        settings = replace(settings, data=str(path.parent / settings.data))
    return settings
