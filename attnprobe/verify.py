"""Checks made once, on the first forward after attaching: is a hook what its name says?"""

from __future__ import annotations

import torch
from torch import Tensor

from attnprobe.rows import Rows


def verify_parts(site: str, parts: dict[str, Tensor], heads: tuple[int, ...] | None) -> None:
    """Check the shapes of what passes at a site.

    Raises:
        ValueError: names the hook, its shape and the one expected.
    """
    pattern = parts["pattern"]
    if pattern.ndim != 4:
        raise ValueError(
            f"the pattern hook of {site} gives shape {tuple(pattern.shape)}, not [batch, head, query, key]."
        )
    batch, n_heads, n_query, n_key = pattern.shape
    if heads is not None and max(heads) >= n_heads:
        raise ValueError(f"head {max(heads)} was asked for and {site} has heads 0 to {n_heads - 1}.")
    for name in ("z", "q"):
        if name in parts and tuple(parts[name].shape[:3]) != (batch, n_query, n_heads):
            raise ValueError(_shape(site, name, parts[name], f"[{batch}, {n_query}, {n_heads}, d]"))
    for name in ("v", "k"):
        if name in parts and (parts[name].ndim != 4 or n_heads % parts[name].shape[2]):
            raise ValueError(_shape(site, name, parts[name], f"[{batch}, keys, key/value heads, d]"))
    scores = parts.get("scores")
    if scores is not None:
        if scores.shape != pattern.shape:
            raise ValueError(_shape(site, "scores", scores, str(list(pattern.shape))))
        if n_key > 1 and torch.equal(scores, pattern):
            raise ValueError(
                f"hook_attn_scores of {site} gives the pattern itself (this architecture computes attention inside "
                "transformers), so there are no pre-softmax scores to analyse."
            )


def verify_outputs(site: str, rows: Rows) -> None:
    """Check on the last row of the first forward that head outputs are the pattern times the values.

    Raises:
        ValueError: they are not: gated attention, or a hook that means something else here.
    """
    if rows.z is None or rows.v is None or rows.kv_head is None or rows.key_position is None:
        return
    real = torch.where((rows.key_position >= 0)[:, :, None, None], rows.v, 0.0)[:, :, rows.kv_head]
    last = rows.position[:, -1] == rows.pattern.shape[-1] - 1  # sequences whose keys are all in this forward
    if not bool(last.any()) or not rows.self_attention:
        return
    row = rows.pattern[last][:, :, -1]
    v = real[last]
    if v.shape[1] != row.shape[-1]:  # padded keys among the values: put them at their positions
        v = torch.stack([sequence[p >= 0] for sequence, p in zip(v, rows.key_position[last], strict=True)])
    expected = torch.einsum("bhk,bkhd->bhd", row, v)
    found = rows.z[last][:, -1]
    gap = (expected - found).abs().amax()
    if bool(gap > 2e-2 * expected.abs().amax().clamp_min(1e-6)):
        raise ValueError(
            f"hook_z of {site} is not the pattern times the values (off by {float(gap):.3g}): the architecture gates "
            "or mixes head outputs, so their split into mean and routing would be wrong. Drop the analyzers that "
            "need z and v, or name other layers."
        )


def _shape(site: str, part: str, value: Tensor, expected: str) -> str:
    return f"the hook of {part} at {site} gives shape {tuple(value.shape)}, not {expected}."
