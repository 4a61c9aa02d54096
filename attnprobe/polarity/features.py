"""Transport features of answers: what the heads of a model do while it reads a prompt and its answer.

Capacity (`TransportCapacity`: phi, cut) and direction (`Asymmetry`: asymmetry, gradient, curl) of every head over all
tokens of prompt and answer, kept answer by answer in a folder that a later call goes on with.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from attnprobe.analyzers import Asymmetry, TransportCapacity
from attnprobe.bench.progress import Bars
from attnprobe.bench.runner import library_versions
from attnprobe.bench.store import Record, Row, Store, key_of, open_store, read_rows
from attnprobe.hosts import Host, host_of
from attnprobe.polarity.answers import LabelledAnswer, content_hash
from attnprobe.polarity.reading import TRUNCATION, Reading, readings
from attnprobe.probe import Probe
from attnprobe.uncertainty.decode import read
from attnprobe.weights import weights_digest

if TYPE_CHECKING:
    import pandas as pd

#: name -> variable of the probe's results
QUANTITIES = {
    "phi": "phi",
    "cut": "cut",
    "asymmetry": "asymmetry",
    "gradient": "asymmetry_gradient",
    "curl": "asymmetry_curl",
}
CUT = "prompt_tokens_cut"
MAX_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class Features:
    """The transport features of the answers of one data set.

    Attributes:
        label: of the data set.
        answers: a row an answer that was read: id, group, label, prompt_tokens, tokens (of the answer), and
            prompt_tokens_cut, how many tokens of the prompt were taken out.
        values: quantity -> [answer, layer, head].
        layers: the numbers of the layers.
        failed: id -> why it was left out.
    """

    label: str
    answers: pd.DataFrame
    values: dict[str, Float[np.ndarray, "answer layer head"]]
    layers: tuple[int, ...]
    failed: dict[str, str]

    @property
    def truncated(self) -> int:
        """How many answers were read after a cut prompt."""
        return int((self.answers[CUT] > 0).sum())


def features_of(
    model: Any,
    answers: Sequence[LabelledAnswer],
    *,
    label: str,
    folder: Path,
    chosen: Sequence[LabelledAnswer] | None = None,
    model_name: str | None = None,
    max_tokens: int | None = None,
    batch_size: int = 8,
    rows: str = "error",
    progress: bool = True,
    tokenizer: Any = None,
) -> Features:
    """Let the model read labelled answers, and keep what its heads did.

    Longest first, in batches of about one length. What is in the folder is not read again, whatever ended the last
    call; it may hold answers of more questions than are asked for now.

    Args:
        model: what `load_model` gives; host="transformers" is the quickest.
        answers: all answers of the data set; the folder belongs to them.
        label: of the data set.
        folder: where the features are kept, as Parquet.
        chosen: those of the answers to read; all by default.
        model_name: what the record calls the model; what tells models apart is a digest of their weights.
        max_tokens: prompt and answer together, at most (`reading.TRUNCATION` says how prompts are cut); 1024 by
            default, or what the model reads if that is less.
        batch_size: answers a forward; numbers do not depend on it.
        rows: policy for models whose rows do not sum to 1, as in `Probe`.
        progress: a bar on standard error, if that is a terminal.
        tokenizer: used instead of `model.tokenizer`.

    Returns:
        `Features` of the chosen answers, in their order; those that could not be read are in `failed`.

    Raises:
        ValueError: the folder holds features of other answers, of another model or length; no answer could be read;
            the model has no tokenizer, or reads less than max_tokens.
        RuntimeError: another run holds the folder.
        OSError: it cannot be written.

    Source: [ST] arXiv 2605.04893 (forced reading of labelled answers).
    """
    tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("answers are text and the model has no tokenizer: pass tokenizer=.")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: use a whole number of at least 1.")
    host = host_of(model)
    if max_tokens is None:
        max_tokens = min(MAX_TOKENS, host.context or MAX_TOKENS)
    if host.context is not None and max_tokens > host.context:
        raise ValueError(f"max_tokens={max_tokens} and the model reads at most {host.context}: use no more than that.")
    todo = readings(answers if chosen is None else chosen, tokenizer, max_tokens)
    names = feature_names(host)
    record = _record(model, answers, label, model_name, max_tokens, rows, names)
    with open_store(folder, record) as store:
        missing = [reading for reading in todo if key_of(label, reading.answer.id) not in store.done]
        store.append(_failed(label, reading, reading.error) for reading in missing if reading.error is not None)
        _read_all(
            host,
            [reading for reading in missing if reading.error is None],
            label,
            store,
            batch_size,
            rows,
            Bars({label: len(todo)}, {label: len(todo) - len(missing)}, progress),
        )
    return stored_features(folder, [reading.answer for reading in todo], label)


def stored_features(folder: Path, answers: Sequence[LabelledAnswer], label: str) -> Features:
    """The features of given answers that a folder holds.

    Raises:
        ValueError: one of the answers is not there, or none of them could be read.
    """
    table = read_rows(folder).table
    frame = None if table is None else table.to_pandas().set_index("id")
    ids = [key_of(label, answer.id)[1] for answer in answers]
    absent = ids if frame is None else [name for name in ids if name not in frame.index]
    if frame is None or absent:
        raise ValueError(f"{str(folder)!r} has no features of {len(absent)} answers ({absent[0]!r} first).")
    frame = frame.loc[ids].assign(group=[answer.group for answer in answers])
    bad = frame["error"].notna()
    if bad.all():
        raise ValueError(f"no answer of {label} could be read; the first: {frame['error'].iloc[0]}.")
    good = frame[~bad]
    places = sorted({(int(parts[1]), int(parts[2])) for name in frame if len(parts := str(name).split("/")) == 3})
    layers = tuple(sorted({layer for layer, _ in places}))
    heads = len({head for _, head in places})
    values = {
        quantity: good[[f"{quantity}/{layer}/{head}" for layer, head in places]]
        .to_numpy(np.float64)
        .reshape(len(good), len(layers), heads)
        for quantity in QUANTITIES
    }
    described = good.reset_index()[["id", "group", "quality", "prompt_tokens", "tokens", CUT]]
    described = described.rename(columns={"quality": "label"}).astype({"label": int, CUT: int})
    return Features(label, described, values, layers, dict(frame["error"][bad].astype(str)))


def feature_names(host: Host) -> list[str]:
    """`quantity/layer/head` of everything that is kept of an answer."""
    layers = sorted({site.layer for site in host.sites("blocks.*.attn.hook_pattern")})
    if host.n_heads is None:
        raise ValueError("the model does not say how many heads it has: the study needs the same number in each layer.")
    return [f"{name}/{layer}/{head}" for name in QUANTITIES for layer in layers for head in range(host.n_heads)]


def _read_all(
    host: Host, todo: Sequence[Reading], label: str, store: Store, batch_size: int, rows: str, bars: Bars
) -> None:
    ordered = sorted(todo, key=lambda reading: (-len(reading), reading.answer.id))
    with bars:
        for batch in _batches(ordered, batch_size):
            bars.advance(label, store.append(_rows(host, batch, label, rows)))


def _batches(ordered: Sequence[Reading], size: int) -> Iterator[list[Reading]]:
    waiting = iter(ordered)
    while batch := list(itertools.islice(waiting, size)):
        yield batch


def _rows(host: Host, batch: Sequence[Reading], label: str, policy: str) -> Iterable[Row]:
    begun = time.perf_counter()
    values = read_features(host, [reading.prompt for reading in batch], [r.completion for r in batch], policy)
    seconds = (time.perf_counter() - begun) / len(batch)
    for i, reading in enumerate(batch):
        scores = {
            f"{name}/{layer}/{head}": float(value)
            for name, (layers, array) in values.items()
            for layer, of_layer in zip(layers, array[i], strict=True)
            for head, value in enumerate(of_layer)
        }
        strange = next((name for name, value in scores.items() if not np.isfinite(value)), None)
        if strange is not None:
            yield _failed(label, reading, f"the feature {strange} is not a finite number")
            continue
        yield Row(
            task=label,
            id=reading.answer.id,
            prompt_tokens=len(reading.prompt),
            tokens=len(reading.completion),
            finish="given",
            quality=float(reading.answer.label),
            seconds=seconds,
            scores={**scores, CUT: float(reading.cut)},
        )


def read_features(
    host: Host, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], rows: str = "error"
) -> dict[str, tuple[list[int], Float[np.ndarray, "answer layer head"]]]:
    """Quantity -> layers and values, over all tokens of prompt and answer, of one batch."""
    probe = Probe([TransportCapacity(), Asymmetry()], rows=rows)
    device = next((p.device for p in host.model.parameters() if not p.is_meta), torch.device("cpu"))
    with torch.no_grad(), probe.attach(host.model, prompt_lengths=[len(prompt) for prompt in prompts]):
        read(host, probe, prompts, completions, device, last_row=True)
    results = probe.results()
    layers = [int(layer) for layer in results["layer"].values]
    return {name: (layers, results[variable].values) for name, variable in QUANTITIES.items()}


def _failed(label: str, reading: Reading, error: str | None) -> Row:
    return Row(
        task=label,
        id=reading.answer.id,
        prompt_tokens=len(reading.prompt),
        tokens=len(reading.completion),
        quality=float(reading.answer.label),
        error=error,
    )


def _record(
    model: Any,
    answers: Sequence[LabelledAnswer],
    label: str,
    model_name: str | None,
    max_tokens: int,
    rows: str,
    names: Sequence[str],
) -> Record:
    config = {
        "answers": content_hash(answers),
        "label": label,
        "weights": weights_digest(model),
        "max_tokens": max_tokens,
        "truncation": TRUNCATION,
        "rows": rows,
    }
    fingerprint = hashlib.sha256(repr(sorted(config.items())).encode()).hexdigest()
    name = model_name or str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)
    return Record(config, fingerprint, (CUT, *names), (label,), name, (library_versions(),))
