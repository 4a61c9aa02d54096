"""The new rows of one attention site: what an analyzer sees.

Axes, named once and used everywhere:

    batch     sequence of the batch
    head      query head (watched ones only)
    kv_head   key/value head (fewer than query heads under grouped-query attention)
    query     new row: one token that looks
    key       token looked at; key j *is* position j of the sequence, padding is gone
    d         head dimension

Rows keep the order in which the host computed them. A padded query stays in its place as a row of zeros with
position -1, so that sums over rows need no special case; `Rows.count` says how many rows are real.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnprobe.functional.factored import Factors
from attnprobe.functional.sums import PatternSums, pattern_sums
from attnprobe.kernels import ColumnSums, column_sums
from attnprobe.kernels.choice import can_fuse

_serial = itertools.count()


class _Pattern:
    """The pattern of rows: given, or computed from their factors when it is first asked for."""

    def __get__(self, rows: Rows | None, owner: type) -> Tensor:
        if rows is None:
            raise AttributeError  # so that the field has no default
        held: Tensor | None = rows.__dict__["pattern"]
        if held is None:
            if rows.factors is None:
                raise ValueError("rows need a pattern, or the factors it is computed from.")
            held = rows.__dict__["pattern"] = rows.factors.pattern()
        return held

    def __set__(self, rows: Rows, pattern: Tensor | None) -> None:
        rows.__dict__["pattern"] = pattern


@dataclass(frozen=True, eq=False, repr=False)
class Rows:
    """New rows of one site, with absolute positions; float32 or float64, on the host's device.

    Attributes:
        pattern: [batch, head, query, key] attention weights, rows sum to 1 (padded queries: zeros). The key axis
            covers every position seen so far, the new ones included. Where the host makes no pattern it is computed
            from `factors` on first use, so that an analyzer which never looks costs none.
        position: [batch, query] position of each query in its own sequence, -1 for padding.
        first: no real query of this chunk stands before this position in the longest sequence: row i never looks
            beyond key first + i (causal sites), known without asking the device.
        padded: some rows may be padding (False only where that is known without asking the device).
        causal: the site is causal self-attention.
        self_attention: queries and keys are the same tokens (False for cross-attention).
        prompt_length: [batch] tokens before the generation, None where nothing is generated.
        shortest_prompt: the smallest of them, known without asking the device.
        longest_generation: no sequence has more tokens after its prompt; None where that is not known.
        tokens: [batch, key] token ids by position (-1: not there), None if the host shows none.
        sink: [batch, head, query] mass on a sink that is not a token (policy `rows="sink"`), else None.
        z: [batch, query, head, d] head outputs `pattern @ v`.
        v, k: [batch, new_key, kv_head, d] values and keys of the new keys; q: [batch, query, head, d].
        key_position: [batch, new_key] positions of v and k, -1 for padding.
        scores: [batch, head, query, key] pre-softmax scores; -inf at keys that are not there, and what the host puts
            where a row may not look (-inf, a large negative number, or the score before the mask: see the pattern).
        kv_head: [head] the key/value head each watched head reads.
        factors: queries and keys that the pattern is computed from, where the host shows them in place of one.
        given_sums: `sums()` of these rows, where they are known already.

    >>> import torch
    >>> rows = Rows.from_pattern(torch.eye(3).reshape(1, 1, 3, 3))
    >>> rows.count.tolist(), rows.diagonal().tolist()
    ([3], [[[1.0, 1.0, 1.0]]])
    """

    pattern: Float[Tensor, "batch head query key"] = _Pattern()  # type: ignore[assignment] # a descriptor
    position: Int[Tensor, "batch query"] = field(kw_only=True)
    first: int = 0
    padded: bool = True
    causal: bool = True
    self_attention: bool = True
    prompt_length: Int[Tensor, "batch"] | None = None
    shortest_prompt: int = 0
    longest_generation: int | None = None
    tokens: Int[Tensor, "batch key"] | None = None
    sink: Float[Tensor, "batch head query"] | None = None
    z: Float[Tensor, "batch query head d"] | None = None
    v: Float[Tensor, "batch new_key kv_head d"] | None = None
    k: Float[Tensor, "batch new_key kv_head d"] | None = None
    q: Float[Tensor, "batch query head d"] | None = None
    key_position: Int[Tensor, "batch new_key"] | None = None
    scores: Float[Tensor, "batch head query key"] | None = None
    kv_head: Int[Tensor, "head"] | None = None
    factors: Factors | None = None
    given_sums: PatternSums | None = None
    serial: int = field(default_factory=lambda: next(_serial))

    @classmethod
    def from_pattern(
        cls,
        pattern: Float[Tensor, "batch head query key"],
        *,
        start: int | None = None,
        z: Tensor | None = None,
        v: Tensor | None = None,
        **fields: object,
    ) -> Rows:
        """Rows of unpadded causal self-attention, for use without a host.

        `start` is the position of the first query; by default the queries are the last keys.
        """
        batch, _, n_query, n_key = pattern.shape
        if start is None:
            start = n_key - n_query
        position = torch.arange(start, start + n_query, device=pattern.device).expand(batch, -1)
        return cls(
            pattern=pattern,
            position=position,
            first=start,
            padded=False,
            z=z,
            v=v,
            key_position=position,
            **fields,  # type: ignore[arg-type] # fields of this class, by name
        )

    @property
    def valid(self) -> Bool[Tensor, "batch query"]:
        """Which rows are real tokens."""
        return self.position >= 0

    @property
    def count(self) -> Int[Tensor, "batch"]:
        """Number of real rows."""
        return self.valid.sum(-1)

    @property
    def n_query(self) -> int:
        """Number of rows, padded ones included."""
        return self.position.shape[1]

    @property
    def n_key(self) -> int:
        """Number of keys, known without computing a pattern."""
        held: Tensor | None = self.__dict__["pattern"]
        return self.factors_or_raise.k.shape[2] if held is None else held.shape[-1]

    @property
    def n_head(self) -> int:
        """Number of watched heads, known without computing a pattern."""
        return self.pattern.shape[1] if self.factors is None else self.factors.q.shape[1]

    @property
    def factors_or_raise(self) -> Factors:
        """The factors.

        Raises:
            ValueError: these rows came as a pattern.
        """
        if self.factors is None:
            raise ValueError("these rows came as a pattern, without the queries and keys it was computed from.")
        return self.factors

    @property
    def keys(self) -> Float[Tensor, "batch head query key"]:
        """The pattern with the sink, if there is one, as an extra first key: a distribution in every row."""
        if self.sink is None:
            return self.pattern
        return torch.cat([self.sink.unsqueeze(-1), self.pattern], -1)

    def attention_to(self, position: Int[Tensor, "batch query"]) -> Float[Tensor, "batch head query"]:
        """Attention of each row to the key at `position` (one a row); 0 where the row or the position is not real."""
        if self.n_key == 0:  # a generation block before the first generated token
            return self.pattern.new_zeros(self.pattern.shape[:-1])
        real = (position >= 0) & self.valid
        index = position.clamp_min(0)[:, None, :, None].expand(-1, self.pattern.shape[1], -1, 1)
        return self.pattern.gather(-1, index).squeeze(-1) * real.unsqueeze(1)

    def diagonal(self) -> Float[Tensor, "batch head query"]:
        """Attention of each row to itself, 0 for padded rows."""
        if not self.self_attention:
            raise ValueError(
                "self-attention weights need queries and keys that are the same tokens; this site is cross-attention."
            )
        return self.attention_to(self.position)

    def fused_sums(self) -> ColumnSums | None:
        """What keys receive, straight from queries and keys, computed once; None where the pattern is the way to it.

        On a GPU that has a kernel for it, and as long as nobody has asked for the pattern.
        """
        fused = self.__dict__.get("_fused")
        if fused is None and self.unformed is not None:
            fused = self.__dict__["_fused"] = column_sums(self.unformed)
        return fused

    @property
    def unformed(self) -> Factors | None:
        """The factors, where the pattern has not been formed and kernels do without."""
        formed = self.__dict__["pattern"] is not None
        return None if formed or self.factors is None or not can_fuse(self.factors) else self.factors

    def sums(self) -> PatternSums:
        """Row and column sums of the pattern, computed once; squares leave out those of tokens on themselves."""
        held: PatternSums | None = self.__dict__.get("_sums", self.given_sums)
        if held is None:
            own = self.position if self.self_attention else None
            held = self.__dict__["_sums"] = pattern_sums(self.pattern, own)
        return held

    def by_position(self) -> Float[Tensor, "batch head key key"]:
        """The whole square pattern with queries in position order, for definitions that pair A_ij with A_ji.

        Raises:
            ValueError: the rows are not all rows of one square pattern.
        """
        batch, heads, n_query, n_key = self.pattern.shape
        if not self.self_attention or self.first != 0 or n_query < n_key:
            raise ValueError(
                "this quantity pairs A_ij with A_ji, so a bidirectional pattern must be square and come in one "
                f"piece; got {n_query} rows from position {self.first} on {n_key} keys."
            )
        index = self.position.clamp_min(0)[:, None, :, None].expand(batch, heads, n_query, n_key)
        return self.pattern.new_zeros(batch, heads, n_key, n_key).scatter_add_(-2, index, self.pattern)

    def __getitem__(self, rows: slice) -> Rows:
        """Some of the rows, in order; keys later than the last of them are cut off at causal self-attention sites."""
        start, stop, step = rows.indices(self.n_query)
        if step != 1:
            raise ValueError("rows are sliced in order: use a step of 1.")
        last_key = self.n_key
        if self.causal and self.self_attention:
            last_key = min(last_key, self.first + stop)
        new_keys: dict[str, Any] = {}
        if self.self_attention:
            for name in ("v", "k", "key_position"):
                value = getattr(self, name)
                new_keys[name] = None if value is None else value[:, start:stop]
        elif start > 0:  # cross-attention keys arrive once, with the first rows
            new_keys = {"v": None, "k": None, "key_position": None}
        held: Tensor | None = self.__dict__["pattern"]
        return replace(
            self,
            pattern=None if held is None else held[..., start:stop, :last_key],  # type: ignore[arg-type] # computed
            factors=None if self.factors is None else self.factors[start:stop],
            position=self.position[:, start:stop],
            first=self.first + start,
            tokens=None if self.tokens is None else self.tokens[:, :last_key],
            given_sums=None,
            sink=None if self.sink is None else self.sink[..., start:stop],
            z=None if self.z is None else self.z[:, start:stop],
            q=None if self.q is None else self.q[:, start:stop],
            scores=None if self.scores is None else self.scores[..., start:stop, :last_key],
            serial=next(_serial),
            **new_keys,
        )

    def generation_block(self, *, renormalize: bool = True) -> Rows:
        """The part of the rows inside the generation: queries and keys from the first generated token on.

        Key 0 of the result is the first generated token. The block is small and heads are compared by it, so it is
        float64 where the device has that. `renormalize` makes every row a distribution again
        (SPEC: the generation block); a row whose whole mass has underflowed to the prompt stays zero.
        """
        blocks: dict[bool, Rows] = self.__dict__.setdefault("_blocks", {})
        if renormalize not in blocks:
            blocks[renormalize] = self._generation_block(renormalize)
        return blocks[renormalize]

    def _generation_block(self, renormalize: bool) -> Rows:
        if self.prompt_length is None:
            raise ValueError("the generation block needs prompt lengths, and these rows carry none.")
        if not (self.causal and self.self_attention):
            raise ValueError("the generation block is defined for causal self-attention only.")
        batch, heads, n_key, device = self.position.shape[0], self.n_head, self.n_key, self.position.device
        width = max(0, n_key - self.shortest_prompt)
        if self.longest_generation is not None:  # in a batch of prompts of all lengths far fewer
            width = min(width, self.longest_generation)
        position = torch.where(self.valid, self.position - self.prompt_length[:, None], -1).clamp_min(-1)
        key = torch.arange(width, device=device) + self.prompt_length[:, None]
        dtype = torch.float32 if device.type == "mps" else torch.float64
        if width:
            inside = (key < n_key)[:, None, None, :] & (position >= 0)[:, None, :, None]
            index = key.clamp(max=n_key - 1)[:, None, None, :].expand(batch, heads, self.n_query, width)
            block = self.pattern.gather(-1, index).to(dtype) * inside
        else:  # nothing is generated yet, and the pattern of the prompt need not be computed for that
            block = torch.zeros(batch, heads, self.n_query, 0, dtype=dtype, device=device)
        if renormalize:
            total = block.sum(-1, keepdim=True)
            block = torch.where(total > 0, block / total.clamp_min(torch.finfo(dtype).tiny), 0.0)
        tokens = None
        if self.tokens is not None:
            tokens = torch.where(key < n_key, self.tokens.gather(1, key.clamp(max=n_key - 1)), -1)
        first = max(0, self.first - self.shortest_prompt)
        return Rows(pattern=block, position=position, first=first, causal=True, tokens=tokens, serial=self.serial)
