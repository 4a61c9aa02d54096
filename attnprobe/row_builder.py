"""From what passed at a site to `Rows`: real tokens only, keys by position, every row a distribution or an error."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.functional.factored import Factors
from attnprobe.functional.sums import pattern_sums
from attnprobe.hosts.base import Site
from attnprobe.row_policy import RowAudit
from attnprobe.rows import Rows
from attnprobe.sequences import Sequences


class RowBuilder:
    """Makes the rows of one site.

    Args:
        site: where.
        heads: watched heads, None for all.
        policy: what to do with rows that do not sum to 1 ("error", "renormalize", "sink").
        queries, keys: the sequences of the queries and of the keys (the same but for cross-attention).
    """

    def __init__(
        self, site: Site, heads: tuple[int, ...] | None, policy: str, queries: Sequences, keys: Sequences
    ) -> None:
        self._site = site
        self._heads = heads
        self._policy = policy
        self._queries = queries
        self._keys = keys
        self._is_self = site.kind != "cross"
        self.audit = RowAudit(site.name, heads, policy)

    def from_pattern(self, parts: dict[str, Tensor], n_heads: int, start: int, new: int) -> Rows:
        """Rows of a pattern that the host made; parts as in `HOOKS`, watched heads only."""
        queries, keys = self._queries, self._keys
        given = parts["pattern"]
        position = queries.positions(start, new, given.device)
        slots = start + new if self._is_self else given.shape[-1]
        pattern = columns_by_slot(given, slots)
        dtype = torch.float64 if given.dtype == torch.float64 else torch.float32
        if queries.padded:
            pattern = torch.where((position >= 0)[:, None, :, None], pattern, 0.0)
        if keys.padded:
            pattern = _by_position(pattern, keys)
        pattern = pattern.to(dtype)
        sums = pattern_sums(pattern, position if self._is_self else None)
        total = self.audit.look(sums, position, given.dtype)
        fields: dict[str, Any] = {name: parts[name].to(dtype) for name in ("z", "q") if name in parts}
        if self._policy == "renormalize":
            pattern = pattern / total.unsqueeze(-1)
            if "z" in fields:  # linear in the row
                fields["z"] = fields["z"] / total.transpose(1, 2).unsqueeze(-1)
        else:
            fields["given_sums"] = sums
        if self._policy == "sink":
            fields["sink"] = (1 - total).clamp_min(0.0)
        if "scores" in parts:
            scores = columns_by_slot(parts["scores"], slots, -torch.inf).to(dtype)
            fields["scores"] = _by_position(scores, keys, -torch.inf) if keys.padded else scores
        n_keys = given.shape[-1]
        return self._rows(parts, n_heads, start, new, n_keys, dtype, pattern=pattern, position=position, **fields)

    def from_factors(
        self,
        parts: dict[str, Tensor],
        keys: Float[Tensor, "batch kv_head slot d"],
        scaling: float,
        window: int | None,
        n_heads: int,
        start: int,
        new: int,
    ) -> Rows:
        """Rows whose pattern is computed when it is asked for. `parts` holds the queries, as "rot_q"."""
        q = parts["rot_q"].transpose(1, 2)
        position = self._queries.positions(start, new, q.device)
        k = keys[:, :, : start + new]
        if self._keys.padded:
            order, real = self._keys.key_order(start + new, q.device)
            # a padded key may hold anything; no row looks at it, and 0 times NaN would still be NaN
            k = torch.where(
                real[:, None, :, None], k.gather(2, order[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])), 0.0
            )
        group = n_heads // k.shape[1]
        factors = Factors(
            q=q,
            k=k,
            position=position,
            kv_head=tuple(head // group for head in self._heads or range(n_heads)),
            scaling=scaling,
            window=window,
            first=start,
            padded=self._queries.padded,
        )
        z = parts["z"].to(factors.dtype)
        new_keys = torch.stack([keys[:, head, start : start + new] for head in factors.kv_head], 1)
        self.audit.look_at_factors(q, new_keys, z, position)
        return self._rows(
            parts,
            n_heads,
            start,
            new,
            start + new,
            factors.dtype,
            pattern=None,
            position=position,
            factors=factors,
            z=z,
        )

    def _rows(
        self,
        parts: dict[str, Tensor],
        n_heads: int,
        start: int,
        new: int,
        n_keys: int,
        dtype: torch.dtype,
        **fields: Any,
    ) -> Rows:
        queries, keys, position = self._queries, self._keys, fields["position"]
        new_keys: dict[str, Any] = {name: parts[name].to(dtype) for name in ("v", "k") if name in parts}
        if new_keys and not self._is_self and start > 0:
            new_keys = {}  # the keys of cross-attention came with the first rows
        device = position.device
        key_position = position if self._is_self else keys.positions(0, n_keys, device)
        causal = self._site.kind == "causal"
        return Rows(
            first=start,  # a position is never beyond its slot
            padded=queries.padded,
            causal=causal,
            self_attention=self._is_self,
            prompt_length=queries.prompt_length.to(device) if causal else None,
            shortest_prompt=queries.shortest_prompt,
            longest_generation=queries.longest_generation,
            tokens=keys.tokens_by_position(start + new if self._is_self else keys.seen, device),
            key_position=key_position if new_keys else None,
            kv_head=self._kv_head(parts, n_heads),
            **fields,
            **new_keys,
        )

    def _kv_head(self, parts: dict[str, Tensor], n_heads: int) -> Tensor | None:
        """The key/value head of each watched head: groups of equal size, in order."""
        heads = self._heads or tuple(range(n_heads))
        for name in ("v", "k"):
            if name in parts:
                group = n_heads // parts[name].shape[2]
                return torch.tensor([head // group for head in heads], device=parts[name].device)
        return None


def columns_by_slot(square: Float[Tensor, "batch head query key"], slots: int, absent: float = 0.0) -> Tensor:
    """Columns by slot. A sliding window shows the last keys only; a static cache shows slack after the last one.

    `absent` stands for columns that are not shown.
    """
    n_key = square.shape[-1]
    if n_key > slots:
        return square[..., :slots]
    return torch.nn.functional.pad(square, (slots - n_key, 0), value=absent) if n_key < slots else square


def _by_position(square: Tensor, keys: Sequences, absent: float = 0.0) -> Tensor:
    order, real = keys.key_order(square.shape[-1], square.device)
    index = order[:, None, None, :].expand(*square.shape[:3], order.shape[1])
    # not a product: pre-softmax scores are infinite where a row may not look
    return torch.where(real[:, None, None, :], square.gather(-1, index), absent)
