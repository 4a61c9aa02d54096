"""One tiny model, everything that can be measured on it, and comparison of labelled results."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from tiny import VOCAB, tiny_bridge
from torch import Tensor

import attnprobe as ap

GREEDY = {"do_sample": False, "verbose": False}
FREE = {**GREEDY, "stop_at_eos": False}
# square roots of numbers that may vanish are compared squared
ROOTS = ("asymmetry_curl", "asymmetry_gradient", "gain_bound")
N_LAYERS = 3

_bridges: dict[str, object] = {}


def bridge(name: str = "llama"):
    if name not in _bridges:
        _bridges[name] = tiny_bridge(name)
    return _bridges[name]


def everything() -> list[ap.Analyzer]:
    return [
        ap.IntrinsicTDO(trace=True),
        ap.TDO("counting", trace=True),
        ap.TDO("positional", lambda2=False, trace=True),
        ap.IntrinsicTDO(scope="generation", trace=True),
        ap.IntrinsicTDO(scope="generation-raw", lambda2=False, trace=True),
        ap.MeanRoutingSplit(trace=True),
        ap.SpectralEntropyBound(trace=True),
        ap.TransportCapacity(trace=True),
        ap.Asymmetry(trace=True),
        ap.SelfAttention(trace=True),
        ap.PreviousTokenAttention(trace=True),
    ]


def tokens(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def padded(sequences: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    width = max(map(len, sequences))
    ids, mask = torch.zeros(len(sequences), width).long(), torch.zeros(len(sequences), width).long()
    for i, sequence in enumerate(sequences):
        where = slice(width - len(sequence), None) if side == "left" else slice(len(sequence))
        ids[i, where], mask[i, where] = sequence, 1
    return ids, mask


def alone(model, sequence: Tensor, prompt_length: int, analyzers=None, **settings) -> xr.Dataset:
    """The sequence by itself, in one forward: what everything else must agree with."""
    probe = ap.Probe(everything() if analyzers is None else analyzers, **settings)
    with probe.attach(model, prompt_lengths=prompt_length), torch.no_grad():
        model(sequence[None])
    return probe.results()


def assert_sequence(found: xr.Dataset, index: int, expected: xr.Dataset, tolerance: float = 1e-5) -> None:
    """Sequence `index` of `found` is the only sequence of `expected`, in every variable, final and trace."""
    one = found.isel(sequence=index)
    wanted = expected.isel(sequence=0)
    assert set(one.data_vars) == set(wanted.data_vars)
    assert int(one.length) == int(wanted.length)
    assert int(one.prompt_length) == int(wanted.prompt_length)
    for name in wanted.data_vars:
        value, there = wanted[name].values, one[name].values
        if "step" in wanted[name].dims:
            steps = value.shape[-1]
            assert np.isnan(there[..., steps:]).all(), f"{name}: steps beyond the sequence"
            there = there[..., :steps]
        if name.removesuffix("_trace") in ROOTS:
            value, there = value**2, there**2
        within = tolerance
        if name.startswith("gain"):  # a quotient by a difference of two energies: a digit less in float32
            within = 10 * tolerance
        if name.startswith("centered_entropy"):  # the entropy of nothing, where nothing is routed
            alpha = wanted[name.replace("centered_entropy", "routed_fraction")].values
            value, there = value[alpha > 1e-9], there[..., : alpha.shape[-1]][alpha > 1e-9]
        np.testing.assert_allclose(there, value, rtol=within, atol=within, equal_nan=True, err_msg=name)


def dropped():
    """Leaving a probe after a forward that raised part way says that its sequences are gone."""
    return pytest.warns(UserWarning, match="dropped from the results")


def traces_on(model) -> dict[str, object]:
    """Everything a probe might leave on a model. What the bridge itself leaves elsewhere is none of our business."""
    roots = {"root": model, "original": getattr(model, "original_model", model), **model.hook_dict}
    everywhere = [
        function
        for module in {*model.modules(), *roots["original"].modules()}
        for function in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    return {
        "hooks": {
            name: [[id(entry.hook) for entry in point.fwd_hooks], len(point.bwd_hooks)]
            for name, point in model.hook_dict.items()
        },
        "handles": {
            name: (list(module._forward_hooks), list(module._forward_pre_hooks)) for name, module in roots.items()
        },
        "ours": [function for function in everywhere if function.__module__.startswith("attnprobe")],
        "shadows": [name for name in vars(model) if "generate" in name],
    }


def scrap(name: str = "llama") -> None:
    """Forget the shared bridge: a failed test has left something on it, and the next ones should not fail for that."""
    _bridges.pop(name, None)


def fake_tokenizer(**ids):
    return SimpleNamespace(**{"pad_token_id": 0, "eos_token_id": 2, **ids})
