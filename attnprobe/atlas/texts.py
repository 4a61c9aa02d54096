"""Texts to read: files and folders of plain text, or a column of a table."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnprobe.bench.data import FILE_KINDS, read_table


@dataclass(frozen=True)
class Text:
    """A text and what to call it: the file that it is from, or `row 12`."""

    name: str
    text: str


def read_texts(source: str | Path, field: str = "text") -> list[Text]:
    """All texts of a source.

    Args:
        source: a `.txt` or `.md` file (one text), a folder of such files, or a JSONL, CSV or Parquet file.
        field: the column of a table that has the text.

    Raises:
        ValueError: it is none of these, a row has no such text, or there are no texts.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.suffix.lower() in _PLAIN)
        texts = [Text(one.name, _plain(one)) for one in files]
    elif path.suffix.lower() in _PLAIN:
        texts = [Text(path.name, _plain(path))]
    elif path.suffix.lower() in FILE_KINDS:
        texts = _column(path, field)
    else:
        raise ValueError(
            f"{str(source)!r} is no source of texts: give a text file ({', '.join(_PLAIN)}), a folder of them, or a "
            f"table ({', '.join(FILE_KINDS)})."
        )
    if not texts:
        raise ValueError(f"the folder {str(source)!r} has no text files ({', '.join(_PLAIN)}).")
    return texts


def named_texts(texts: Sequence[str] | Sequence[Text]) -> list[Text]:
    """Strings with names by their number.

    Raises:
        TypeError: one string in place of a list, or something that is no text.
        ValueError: no texts at all.

    >>> [one.name for one in named_texts(["To be", "or not"])]
    ['text 0', 'text 1']
    """
    if isinstance(texts, str):
        raise TypeError("texts is one string: give a list of texts.")
    named = []
    for i, one in enumerate(texts):
        if not isinstance(one, str | Text):
            raise TypeError(f"text {i} is a {type(one).__name__}: give strings.")
        named.append(one if isinstance(one, Text) else Text(f"text {i}", one))
    if not named:
        raise ValueError("there are no texts: give at least one.")
    return named


def content_hash(texts: Sequence[Text]) -> str:
    """What tells one list of texts from another."""
    digest = hashlib.sha256()
    for one in texts:
        digest.update(repr((one.name, one.text)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


_PLAIN = (".txt", ".md")


def _plain(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} is not UTF-8 text.") from None
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror or error}.") from None


def _column(path: Path, field: str) -> list[Text]:
    table = read_table(str(path))
    texts = []
    for i, row in enumerate(table.rows):
        value = row.get(field)
        if not isinstance(value, str):
            has = ", ".join(map(str, row)) or "nothing"
            raise ValueError(f"row {i} of {table.name} has no text in {field!r} (it has {has}): name the field.")
        texts.append(Text(f"row {i}", value))
    return texts
