"""Features of answers: what the heads of a model do while it reads a prompt and its answer."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from attnprobe.bench.progress import Bars
from attnprobe.detection.feature_settings import Column, FeatureSettings, Head
from attnprobe.detection.fingerprint import Fingerprint
from attnprobe.detection.kept import Kept, keep_in
from attnprobe.detection.reading import Reading, Text, reading_of
from attnprobe.hosts import Host, host_of
from attnprobe.probe import Probe
from attnprobe.probe_settings import DEFAULT_PATTERN
from attnprobe.uncertainty.decode import read

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, eq=False)
class Features:
    """The features of some texts.

    Attributes:
        values: [text, feature] float32; `columns` says what is what.
        settings: what was asked for.
        heads: the (layer, head) pairs that the features belong to.
        model: whose heads they are.
        prompt_tokens, answer_tokens: [text] tokens that the model read.
        cut: [text] tokens that were taken out of the prompt because it was too long.
    """

    values: Float[np.ndarray, "text feature"]
    settings: FeatureSettings
    heads: tuple[Head, ...]
    model: Fingerprint
    prompt_tokens: Int[np.ndarray, "text"]
    answer_tokens: Int[np.ndarray, "text"]
    cut: Int[np.ndarray, "text"]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The set, number, layer and head of every feature."""
        return self.settings.columns(self.heads)

    @property
    def truncated(self) -> int:
        """How many texts were read after a cut prompt."""
        return int((self.cut > 0).sum())

    def only(self, *kinds: str) -> Features:
        """The features of some of the sets.

        Raises:
            ValueError: one of them is not there.
        """
        absent = [kind for kind in kinds if kind not in self.settings.kinds]
        if absent or not kinds:
            raise ValueError(f"there are no features {', '.join(absent) or 'of no set'}: {self._have}.")
        settings = replace(self.settings, kinds=tuple(kind for kind in self.settings.kinds if kind in kinds))
        wanted = [column.kind in kinds for column in self.columns]
        return replace(self, settings=settings, values=self.values[:, wanted])

    def __getitem__(self, texts: Int[np.ndarray, "some"] | Bool[np.ndarray, "text"] | slice) -> Features:
        """The features of some of the texts."""
        return replace(
            self,
            values=self.values[texts],
            prompt_tokens=self.prompt_tokens[texts],
            answer_tokens=self.answer_tokens[texts],
            cut=self.cut[texts],
        )

    @property
    def _have(self) -> str:
        return f"these are {', '.join(self.settings.kinds)}"


def features_of(
    model: Any,
    prompts: Sequence[Text],
    answers: Sequence[Text],
    settings: FeatureSettings | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    batch_size: int = 8,
    progress: bool = True,
    tokenizer: Any = None,
) -> Features:
    """Let a model read given answers after their prompts, and keep what its heads did over all tokens of both.

    Nothing is generated. With a folder every batch is on the disk before the next begins: a call that was ended goes on
    after the batches that are there, and texts that another call has read are not read again.

    Args:
        model: what `load_model` gives; host="transformers" is the quickest.
        prompts, answers: strings or lists of token ids, an answer a prompt. One space parts strings, unless there is
            white space between them. `reading.reading_of` says how long prompts are cut, and `Features.cut` how much.
        settings: which features; the TDO spectrum of all heads by default.
        folder: where features are kept.
        batch_size: texts a forward; numbers do not depend on it.
        progress: a bar on standard error, if that is a terminal.
        tokenizer: used instead of `model.tokenizer`.

    Returns:
        `Features`, in the order of the prompts.

    Raises:
        ValueError: lists of different lengths, a blank text, an answer that leaves no room for its prompt, fewer tokens
            than k, heads that the model does not have, token ids outside its vocabulary, more tokens than it reads,
            a feature that is no finite number, or a folder with features of other settings or of another model.
        RuntimeError: another call holds the folder.
        OSError: the folder cannot be written.

    Example::

        model = attnprobe.load_model(host="transformers")
        features = features_of(model, ["The capital of France is"], ["Paris."], FeatureSettings(["tdo", "transport"]))

    Source: [SG] arXiv 2610.06012, appendix; [LE] arXiv 2502.17598.
    """
    settings = settings or FeatureSettings()
    host = host_of(model)
    tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: use a whole number of at least 1.")
    readings = _readings(prompts, answers, tokenizer, settings, host)
    heads = _heads(settings, host)
    fingerprint = Fingerprint.of(host)
    keys = [_key(reading) for reading in readings]
    said = {"format": 1, "settings": asdict(settings), "heads": heads, "model": asdict(fingerprint)}
    with keep_in(folder, said, len(settings.columns(heads))) as kept:
        todo = {key: reading for key, reading in zip(keys, readings, strict=True) if key not in kept.rows}
        _read_all(host, todo, kept, settings, heads, batch_size, progress)
        values = np.stack([kept.rows[key] for key in keys])
    counts = np.array([(len(r.prompt), len(r.answer), r.cut) for r in readings])
    return Features(values, settings, heads, fingerprint, counts[:, 0], counts[:, 1], counts[:, 2])


def _readings(
    prompts: Sequence[Text], answers: Sequence[Text], tokenizer: Any, settings: FeatureSettings, host: Host
) -> list[Reading]:
    for name, given in (("prompts", prompts), ("answers", answers)):
        if isinstance(given, str):
            raise TypeError(f"{name} is a string: give a list of them.")
    if len(prompts) != len(answers) or not len(prompts):
        raise ValueError(f"there are {len(answers)} answers for {len(prompts)} prompts: give one for each.")
    if host.context is not None and settings.max_tokens > host.context:
        raise ValueError(
            f"max_tokens={settings.max_tokens} and the model reads at most {host.context}: use no more than that."
        )
    readings = [
        reading_of(prompt, answer, tokenizer, settings.max_tokens, f"text {i}")
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    for i, reading in enumerate(readings):
        if len(reading) < settings.fewest_tokens:
            raise ValueError(
                f"text {i} has {len(reading)} tokens and its features need {settings.fewest_tokens}: use a smaller k, "
                "or leave the text out."
            )
        wrong = [t for t in (*reading.prompt, *reading.answer) if t < 0 or t >= (host.vocabulary or t + 1)]
        if wrong:
            raise ValueError(
                f"text {i} holds token id {wrong[0]}, outside the model's vocabulary of {host.vocabulary}."
            )
    return readings


def _heads(settings: FeatureSettings, host: Host) -> tuple[Head, ...]:
    """The heads that are asked for, all of them being there."""
    layers = sorted({site.layer for site in host.sites(DEFAULT_PATTERN)})
    if host.n_heads is None:
        raise ValueError("the model does not say how many heads its layers have: features would have no fixed places.")
    if settings.heads == "all":
        return tuple((layer, head) for layer in layers for head in range(host.n_heads))
    for layer, head in settings.heads:
        if layer not in layers or head >= host.n_heads:
            raise ValueError(
                f"head {head} of layer {layer} is asked for, and the model has heads 0 to {host.n_heads - 1} in the "
                f"layers {layers[0]} to {layers[-1]}."
            )
    return tuple(settings.heads)  # type: ignore[arg-type] # not "all"


def _key(reading: Reading) -> str:
    """What a text is known by on disk: what the model reads of it."""
    return hashlib.sha256(json.dumps([reading.prompt, reading.answer]).encode()).hexdigest()[:32]


def _read_all(
    host: Host,
    todo: dict[str, Reading],
    kept: Kept,
    settings: FeatureSettings,
    heads: tuple[Head, ...],
    batch_size: int,
    progress: bool,
) -> None:
    # texts of one length go together, the longest first: if one is too long for the memory, that is seen at once
    ordered = sorted(todo, key=lambda key: (-len(todo[key]), key))
    total = len(todo) + len(kept.rows)
    with Bars({"features": total}, {"features": len(kept.rows)}, progress) as bars:
        for keys in _batches(ordered, batch_size):
            kept.append(keys, _read(host, [todo[key] for key in keys], settings, heads))
            bars.advance("features", len(keys))


def _batches(ordered: Sequence[str], size: int) -> Iterator[list[str]]:
    waiting = iter(ordered)
    while batch := list(itertools.islice(waiting, size)):
        yield batch


def _read(
    host: Host, batch: Sequence[Reading], settings: FeatureSettings, heads: tuple[Head, ...]
) -> Float[np.ndarray, "text feature"]:
    """The features of one batch, in one forward."""
    layers, numbers = (sorted(set(some)) for some in zip(*heads, strict=True))
    probe = Probe(settings.analyzers(), layers=layers, heads=numbers, rows=settings.rows)
    device = next((p.device for p in host.model.parameters() if not p.is_meta), torch.device("cpu"))
    prompts, answers = [one.prompt for one in batch], [one.answer for one in batch]
    with torch.no_grad(), probe.attach(host.model, prompt_lengths=[len(prompt) for prompt in prompts]):
        read(host, probe, prompts, answers, device, last_row=True)
    results = probe.results()
    values = np.concatenate([_of_heads(results[name], heads) for name in settings.variables], -1).astype(np.float32)
    strange = np.argwhere(~np.isfinite(values))
    if len(strange):
        text, at = strange[0]
        column = settings.columns(heads)[at]
        raise ValueError(
            f"{column.variable} of head {column.head} in layer {column.layer} is {values[text, at]} for a text of "
            f"{len(batch[text])} tokens, which is no feature: leave the head or the text out."
        )
    return values


def _of_heads(result: xr.DataArray, heads: tuple[Head, ...]) -> Float[np.ndarray, "text head"]:
    """One number of every text and head."""
    layer = {int(n): i for i, n in enumerate(result["layer"].values)}
    head = {int(n): i for i, n in enumerate(result["head"].values)}
    values: np.ndarray = result.values[:, [layer[one] for one, _ in heads], [head[one] for _, one in heads]]
    return values
