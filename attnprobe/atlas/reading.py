"""What every head does while the model reads a text, kept text by text in a folder that a later call goes on with."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from attnprobe.analyzers import (
    TDO,
    Analyzer,
    Asymmetry,
    DuplicateTokenScore,
    InductionScore,
    IntrinsicTDO,
    LaplacianEigenvalues,
    LogDeterminant,
    MeanLookBack,
    MeanRoutingSplit,
    PreviousTokenAttention,
    RowEntropy,
    SelfAttention,
    SinkScore,
    SpectralEntropyBound,
    TransportCapacity,
    ValueWeightedAttention,
)
from attnprobe.atlas.texts import Text, content_hash
from attnprobe.bench.extra import need
from attnprobe.bench.progress import Bars
from attnprobe.bench.runner import library_versions
from attnprobe.bench.store import Record, Row, key_of, open_store, read_rows
from attnprobe.hosts import Host, host_of
from attnprobe.probe import Probe
from attnprobe.weights import weights_digest

if TYPE_CHECKING:
    import pandas as pd

TASK = "heads"


def default_diagnostics() -> list[Analyzer]:
    """The analyzers of an atlas, where no others are named."""
    return [
        SinkScore(),
        RowEntropy(),
        RowEntropy(exclude_sink=True),
        PreviousTokenAttention(),
        SelfAttention(),
        MeanLookBack(),
        DuplicateTokenScore(),
        InductionScore(),
        IntrinsicTDO(),
        TDO("counting", lambda2=False),
        SpectralEntropyBound(),
        MeanRoutingSplit(bound=False),
        ValueWeightedAttention(),
        LaplacianEigenvalues(),
        LogDeterminant(),
        TransportCapacity(),
        Asymmetry(),
    ]


@dataclass(frozen=True, eq=False)
class Readings:
    """The values of every head on every text.

    Attributes:
        texts: [text] a row a text that was read: name and tokens.
        values: diagnostic -> [text, layer, head]; NaN where a text has no such row.
        described: diagnostic -> its long name and units.
        layers: the numbers of the layers.
        failed: name of a text -> why it was left out.
        cut: how many texts were longer than what is read of one.
    """

    texts: pd.DataFrame
    values: dict[str, Float[np.ndarray, "text layer head"]]
    described: dict[str, dict[str, str]]
    layers: tuple[int, ...]
    failed: dict[str, str]
    cut: int


def read_heads(
    model: Any,
    texts: Sequence[Text],
    analyzers: Sequence[Analyzer],
    *,
    folder: Path,
    max_tokens: int,
    min_tokens: int,
    rows: str,
    tokenizer: Any,
    model_name: str | None,
    progress: bool,
) -> Readings:
    """Let the model read the texts that are not in the folder yet, one at a time, and give all of them.

    Raises:
        ValueError: the folder holds readings of other texts, of another model or by other analyzers; no text could be
            read; a limit that the model cannot keep.
        RuntimeError: another run holds the folder.
        ImportError: pyarrow is not installed.
    """
    need("pyarrow")
    host = host_of(model)
    described = {name: dict(about) for one in analyzers for name, about in one.variables.items()}
    columns, layers = _columns(host, analyzers)
    record = _record(model, texts, analyzers, columns, max_tokens, min_tokens, rows, model_name)
    with open_store(folder, record) as store:
        waiting = [one for one in texts if key_of(TASK, one.name) not in store.done]
        with Bars({TASK: len(texts)}, {TASK: len(texts) - len(waiting)}, progress) as bars:
            for one in waiting:
                row = _row(host, one, analyzers, max_tokens, min_tokens, rows, tokenizer)
                bars.advance(TASK, store.append([row]))
    return _readings(folder, texts, columns, layers, described, max_tokens)


def _columns(host: Host, analyzers: Sequence[Analyzer]) -> tuple[list[str], tuple[int, ...]]:
    """`diagnostic/layer/head` of everything that is kept of a text, as the model shows it on a few tokens."""
    results = _results(host, [0, 1, 2], analyzers, "renormalize")
    names = [name for name, value in results.data_vars.items() if value.dims == ("sequence", "layer", "head")]
    layers = tuple(int(layer) for layer in results["layer"].values)
    heads = [int(head) for head in results["head"].values]
    return [f"{name}/{layer}/{head}" for name in names for layer in layers for head in heads], layers


def _results(host: Host, ids: Sequence[int], analyzers: Sequence[Analyzer], rows: str) -> Any:
    probe = Probe(analyzers, rows=rows)
    device = next((p.device for p in host.model.parameters() if not p.is_meta), torch.device("cpu"))
    tokens = torch.tensor([list(ids)], device=device)
    with torch.no_grad(), probe.attach(host.model):
        host.decode(tokens, torch.ones_like(tokens), None, 1)
    return probe.results()


def _row(
    host: Host, text: Text, analyzers: Sequence[Analyzer], max_tokens: int, min_tokens: int, rows: str, tokenizer: Any
) -> Row:
    ids = list(tokenizer(text.text)["input_ids"])
    read = ids[:max_tokens]
    if len(read) < min_tokens:
        return Row(TASK, text.name, tokens=len(ids), error=f"it has {len(ids)} tokens, fewer than {min_tokens}")
    begun = time.perf_counter()
    try:
        results = _results(host, read, analyzers, rows)
    except ValueError as error:
        return Row(TASK, text.name, prompt_tokens=len(read), tokens=len(ids), error=" ".join(str(error).split()))
    scores = {column: float(value) for column, value in _flat(results)}
    seconds = time.perf_counter() - begun
    return Row(TASK, text.name, prompt_tokens=len(read), tokens=len(ids), seconds=seconds, scores=scores)


def _flat(results: Any) -> Iterator[tuple[str, float]]:
    layers, heads = results["layer"].values, results["head"].values
    for name, value in results.data_vars.items():
        if value.dims == ("sequence", "layer", "head"):
            for layer, of_layer in zip(layers, value.values[0], strict=True):
                for head, one in zip(heads, of_layer, strict=True):
                    yield f"{name}/{layer}/{head}", one


def _readings(
    folder: Path,
    texts: Sequence[Text],
    columns: Sequence[str],
    layers: tuple[int, ...],
    described: dict[str, dict[str, str]],
    max_tokens: int,
) -> Readings:
    table = read_rows(folder).table
    assert table is not None  # every text has a row
    frame = table.to_pandas().set_index("id").loc[[key_of(TASK, one.name)[1] for one in texts]]
    failed = frame["error"].dropna().astype(str)
    good = frame[frame["error"].isna()]
    if good.empty:
        raise ValueError(f"none of {len(texts)} texts could be read; the first, {failed.index[0]!r}: {failed.iloc[0]}.")
    names = list(dict.fromkeys(column.split("/")[0] for column in columns))
    values = {
        name: good[[column for column in columns if column.split("/")[0] == name]]
        .to_numpy(np.float64)
        .reshape(len(good), len(layers), -1)
        for name in names
    }
    read = good.reset_index()[["id", "prompt_tokens"]].rename(columns={"id": "name", "prompt_tokens": "tokens"})
    return Readings(
        texts=read.astype({"tokens": int}),
        values=values,
        described={name: described.get(name, {}) for name in names},
        layers=layers,
        failed=dict(failed),
        cut=int((good["tokens"] > max_tokens).sum()),
    )


def _record(
    model: Any,
    texts: Sequence[Text],
    analyzers: Sequence[Analyzer],
    columns: Sequence[str],
    max_tokens: int,
    min_tokens: int,
    rows: str,
    model_name: str | None,
) -> Record:
    config = {
        "texts": content_hash(texts),
        "weights": weights_digest(model),
        "analyzers": [repr(one) for one in analyzers],
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "rows": rows,
    }
    fingerprint = hashlib.sha256(repr(sorted(config.items())).encode()).hexdigest()
    name = model_name or str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)
    return Record(config, fingerprint, tuple(columns), (TASK,), name, (library_versions(),))
