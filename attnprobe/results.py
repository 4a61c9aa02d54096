"""Labelled results: one `xarray.Dataset` over sequences, layers, heads and steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.hosts.base import Site
from attnprobe.sequences import Sequences
from attnprobe.stream import SiteValues

if TYPE_CHECKING:
    import xarray as xr

# name, dimensions, attributes of what a probe with logits keeps of the tokens
_TOKEN_VARIABLES = {
    "token_log_probability": {"long_name": "log-probability of the generated token", "units": "nats"},
    "token_entropy": {"long_name": "entropy of the next-token distribution", "units": "nats"},
}


@dataclass(frozen=True)
class Batch:
    """The values of one batch of sequences, as numpy arrays.

    Attributes:
        call: which call of the model, in order.
        sites: the watched sites.
        final: variable -> [sequence, layer, head] or [sequence, layer, head, position].
        trace: variable -> [sequence, layer, head, step].
        per_token: variable -> [sequence, step].
        length, prompt_length: [sequence] tokens.
    """

    call: int
    sites: tuple[Site, ...]
    final: dict[str, np.ndarray]
    trace: dict[str, np.ndarray]
    per_token: dict[str, np.ndarray]
    length: np.ndarray
    prompt_length: np.ndarray

    def nothing(self, n_axes: int) -> np.ndarray:
        """What stands for a variable that this batch has no step of."""
        return np.zeros((len(self.length), *([0] * (n_axes - 1))), dtype=np.float32)

    @classmethod
    def of(
        cls,
        call: int,
        sites: Sequence[Site],
        values: Mapping[Site, SiteValues],
        sequences: Sequences,
        tokens: tuple[Tensor, Tensor, Tensor] | None,
    ) -> Batch:
        """Bring the values of every site to the host and put traces in step order."""
        prompt = sequences.prompt_length.cpu().numpy().copy()
        final = {
            name: _stack([values[s].final.get(name) for s in sites]) for name in _names(values[s].final for s in sites)
        }
        trace = {}
        for name in _names(values[s].trace for s in sites):
            traced = [values[s].trace.get(name) for s in sites]
            position = next(values[s].position for s in sites if name in values[s].trace).cpu().numpy()
            trace[name] = _by_step(_stack(traced), position, prompt)
        per_token = {}
        if tokens is not None:
            rows = tokens[0].cpu().numpy()
            for name, value in zip(_TOKEN_VARIABLES, tokens[1:], strict=True):
                per_token[name] = _by_step(_numpy(value)[:, None, None], rows, prompt)[:, 0, 0]
        length = sequences.length().cpu().numpy()
        if (prompt > length).any():
            i = int((prompt > length).argmax())
            raise ValueError(
                f"prompt_lengths gives sequence {i} a prompt of {prompt[i]} tokens, and it has {length[i]} in all."
            )
        return cls(call, tuple(sites), final, trace, per_token, length, prompt)


def dataset_of(
    batches: Sequence[Batch],
    analyzers: Sequence[Analyzer],
    heads: Sequence[int] | None,
    attributes: Mapping[str, Any],
) -> xr.Dataset:
    """All batches in one dataset; ragged ends are NaN."""
    import xarray as xr

    sites = batches[0].sites
    one_stack = len({(site.stack, site.kind) for site in sites}) == 1
    layer = [site.layer if one_stack else site.name for site in sites]
    descriptions: dict[str, Mapping[str, str]] = {}
    for analyzer in analyzers:
        descriptions.update(analyzer.variables)
    variables: dict[str, tuple[tuple[str, ...], np.ndarray, dict[str, str]]] = {}
    for name in _names(batch.final for batch in batches):
        joined = _concatenate([batch.final.get(name, batch.nothing(4)) for batch in batches])
        dims = ("sequence", "layer", "head", "position")[: joined.ndim]
        variables[name] = (dims, joined, dict(descriptions.get(name, {})))
    for name in _names(batch.trace for batch in batches):
        joined = _concatenate([batch.trace.get(name, batch.nothing(4)) for batch in batches])
        described = {
            **descriptions.get(name, {}),
            "step": "t, from 1: the prefix that chose generated token t",
        }
        variables[f"{name}_trace"] = (("sequence", "layer", "head", "step"), joined, described)
    for name in _names(batch.per_token for batch in batches):
        joined = _concatenate([batch.per_token.get(name, batch.nothing(2)) for batch in batches])
        variables[name] = (("sequence", "step"), joined, dict(_TOKEN_VARIABLES[name]))
    steps = max((v.shape[-1] for dims, v, _ in variables.values() if "step" in dims), default=0)
    for name, (dims, value, described) in variables.items():
        if "step" in dims and value.shape[-1] < steps:
            variables[name] = (dims, _widen(value, (*value.shape[:-1], steps)), described)
    n_heads = max((v.shape[2] for dims, v, _ in variables.values() if "head" in dims), default=0)
    length = np.concatenate([batch.length for batch in batches])
    coordinates = {
        "sequence": np.arange(len(length)),
        "layer": layer,
        "head": np.arange(n_heads) if heads is None else list(heads),
        "call": ("sequence", np.concatenate([np.full(len(b.length), b.call) for b in batches])),
        "length": ("sequence", length, {"long_name": "tokens read", "units": "tokens"}),
        "prompt_length": (
            "sequence",
            np.concatenate([batch.prompt_length for batch in batches]),
            {"long_name": "tokens of the prompt", "units": "tokens"},
        ),
    }
    if steps:
        coordinates["step"] = np.arange(1, steps + 1)
    return xr.Dataset(variables, coordinates, {**attributes, "created_by": "attnprobe"})


def _names(values: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every name, in the order of first appearance."""
    return list(dict.fromkeys(name for value in values for name in value))


def _numpy(value: Tensor) -> np.ndarray:
    array: np.ndarray = value.detach().cpu().numpy()
    return array


def _stack(values: Sequence[Tensor | None]) -> np.ndarray:
    """[sequence, layer, head, ...]; layers of fewer heads or keys, or without a value, are filled with NaN."""
    like = next(_numpy(value) for value in values if value is not None)
    nothing = like[(slice(None), *[slice(0)] * (like.ndim - 1))]
    arrays = [nothing if value is None else _numpy(value) for value in values]
    shape = tuple(np.max([array.shape for array in arrays], axis=0))
    return np.stack([_widen(array, shape) for array in arrays], axis=1)


def _by_step(value: np.ndarray, position: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """[sequence, layer, head, row] to [sequence, layer, head, step]: the row at position P - 2 + t is step t."""
    step = np.where(position >= 0, position - (prompt[:, None] - 1), -1)
    n_steps = int(step.max(initial=-1)) + 1
    out = np.full((*value.shape[:3], n_steps), np.nan, dtype=value.dtype)
    sequence, row = np.nonzero(step >= 0)
    out[sequence, :, :, step[sequence, row]] = value[sequence, :, :, row]
    return out


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    shape = tuple(np.max([array.shape[1:] for array in arrays], axis=0))
    return np.concatenate([_widen(array, (array.shape[0], *shape)) for array in arrays])


def _widen(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape == tuple(shape):
        return array
    out = np.full(shape, np.nan, dtype=np.result_type(array.dtype, np.float32))
    out[tuple(slice(n) for n in array.shape)] = array
    return out
