"""Checks on what a host shows: is a hook what its name says, and is a mask the one that positions imply?"""

from __future__ import annotations

from typing import NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnprobe.hosts.base import Attention
from attnprobe.rows import Rows
from attnprobe.sequences import Plan, Sequences


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


def verify_outputs(
    site: str, last: Rows, v: Float[Tensor, "batch slot kv_head d"], position: Int[Tensor, "batch slot"]
) -> None:
    """Check on the last row of the first forward that head outputs are the pattern times the values.

    Args:
        last: that row.
        v, position: values of every slot and their positions, -1 for padding.

    Raises:
        ValueError: they are not: gated attention, or a hook that means something else here.
    """
    whole = (last.position[:, 0] == last.n_key - 1).nonzero().flatten()  # sequences that end here
    if last.z is None or last.kv_head is None or not len(whole):
        return
    sequence = int(whole[0])
    row, found = last.pattern[sequence, :, 0], last.z[sequence, 0]
    values = v[sequence][position[sequence] >= 0].to(row)
    groups = [last.kv_head == group for group in range(values.shape[1])]
    expected = torch.zeros_like(found)
    for group, heads in enumerate(groups):
        expected[heads] = row[heads] @ values[:, group]
    gap = (expected - found).abs().amax()
    if bool(gap > 2e-2 * expected.abs().amax().clamp_min(1e-6)):
        raise ValueError(
            f"the output z of {site} is not the pattern times the values (off by {float(gap):.3g}): the architecture "
            "gates or mixes head outputs, or attends by another rule than softmax(q k^T), so what is computed from "
            "them would be wrong. Drop the analyzers that need z and v, or name other layers."
        )


def verify_mask(site: str, attention: Attention, sequences: Sequences, plan: Plan) -> Tensor | None:
    """Check that rows see what their positions imply: earlier real tokens within the window, and themselves.

    Layers share masks, and `plan.masks` says which were looked at.

    Returns:
        On an accelerator a boolean scalar, true where a mask is another one, so that nobody waits for the device.

    Raises:
        ValueError: another mask, such as one of the user's own, or fewer keys than the window has.
    """
    mask, window, seen = attention.mask, attention.window, plan.start + plan.new
    if attention.k.shape[2] < (seen if window is None else min(seen, window)):
        refuse_mask(site)
    if mask is None:  # plain causal: nothing is padding, and no window is narrower than the keys
        if window is not None and min(seen, attention.k.shape[2]) > window:
            refuse_mask(site)
        if plan.new > 1 and sequences.padded and bool((sequences.positions(plan.start, plan.new) < 0).any()):
            raise ValueError(f"{site} attends without a mask and the batch is padded, so padding is taken for text.")
        return None
    if (id(mask), window) in plan.masks:
        return None
    plan.masks.add((id(mask), window))
    query = sequences.positions(plan.start, plan.new, mask.device)
    key = sequences.positions(0, seen, mask.device)[:, -mask.shape[-1] :]
    wrong = torch.zeros((), dtype=torch.bool, device=mask.device)
    for low in range(0, plan.new, _MASK_ROWS):
        rows = query[:, low : low + _MASK_ROWS, None]
        expected = (key[:, None] >= 0) & (key[:, None] <= rows)
        if window is not None:
            expected &= key[:, None] > rows - window
        given = mask[:, 0, plan.skip :][:, low : low + _MASK_ROWS, :seen]
        allowed = given if given.dtype == torch.bool else given == 0
        # a sliding cache no longer shows keys that have slid out by slots, and may be within the window by positions
        visible = rows + 1 if window is None else (rows + 1).clamp(max=window)
        missing = allowed.sum(-1, keepdim=True) != visible
        wrong |= (((allowed != expected) | missing) & (rows >= 0)).any()
    if mask.device.type != "cpu":
        return wrong
    if bool(wrong):
        refuse_mask(site)
    return None


def refuse_mask(site: str) -> NoReturn:
    """Say that a site attends by another mask than positions imply."""
    raise ValueError(
        f"{site} attends by a mask that is not plain causal or of a known window, so its pattern cannot be told from "
        "queries and keys: call model.set_attn_implementation('eager'), or load the model as a TransformerBridge."
    )


_MASK_ROWS = 256


def _shape(site: str, part: str, value: Tensor, expected: str) -> str:
    return f"the hook of {part} at {site} gives shape {tuple(value.shape)}, not {expected}."
