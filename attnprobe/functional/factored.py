"""A pattern that is known by its queries and keys: rows are computed when they are asked for, never all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Factors:
    """Rows of causal self-attention A = softmax(scaling q k^T), with keys by position.

    Row i looks at the keys j <= position_i, and where there is a window at those with j > position_i - window only.
    O((query + key) d) numbers stand for O(query key).

    Attributes:
        q: [batch, head, query, d] queries, after any rotary embedding.
        k: [batch, kv_head, key, d] keys, likewise; key j is position j of its sequence.
        position: [batch, query] position of each query, -1 for padding (a row of zeros).
        kv_head: the key/value head that each head reads.
        scaling: what q k^T is multiplied by.
        window: how many keys a row sees at most, its own included; None for all.
        first: no query stands before this position in the longest sequence (row i reaches key first + i at most).
        padded: some rows are padding, or stand before `first + i`.

    >>> import torch
    >>> q = k = torch.zeros(1, 1, 3, 2)
    >>> factors = Factors(q, k, torch.arange(3)[None], kv_head=(0,), scaling=1.0)
    >>> factors.pattern()[0, 0].tolist()[1]
    [0.5, 0.5, 0.0]
    """

    q: Float[Tensor, "batch head query d"]
    k: Float[Tensor, "batch kv_head key d"]
    position: Int[Tensor, "batch query"]
    kv_head: tuple[int, ...]
    scaling: float
    window: int | None = None
    first: int = 0
    padded: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """In which rows are computed: float32, or float64 where the factors are."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def __getitem__(self, rows: slice) -> Factors:
        """Some of the rows, and the keys that they reach."""
        start, stop, _ = rows.indices(self.q.shape[2])
        return replace(
            self,
            q=self.q[:, :, start:stop],
            k=self.k[:, :, : self.first + stop],
            position=self.position[:, start:stop],
            first=self.first + start,
        )

    def heads(self, chosen: Int[Tensor, "sequence"], sequences: Int[Tensor, "sequence"] | None = None) -> Factors:
        """One head of each sequence, or of some of them: a batch of one head."""
        batch = torch.arange(self.q.shape[0], device=self.q.device) if sequences is None else sequences
        kv_head = torch.tensor(self.kv_head, device=chosen.device)[chosen]
        return replace(
            self,
            q=self.q[batch, chosen].unsqueeze(1),
            k=self.k[batch, kv_head].unsqueeze(1),
            position=self.position[batch],
            kv_head=(0,),
        )

    def scores(self) -> Float[Tensor, "batch head query key"]:
        """scaling q k^T where a row may look, -inf elsewhere."""
        q, k = self.q.to(self.dtype) * self.scaling, self.k.to(self.dtype)
        scores = self._products(q, k)
        # columns that every row of the block may see need no mask
        low = 0 if self.padded or self.window is not None else self.first
        if low < scores.shape[-1]:
            scores[..., low:].masked_fill_(self._hidden(low, scores.shape[-1])[:, None], -torch.inf)
        return scores

    def pattern(self) -> Float[Tensor, "batch head query key"]:
        """The rows: each a distribution, zeros where the query is padding."""
        pattern = self.scores().softmax(-1)
        if self.padded:
            pattern = torch.where((self.position >= 0)[:, None, :, None], pattern, 0.0)
        return pattern

    def without_keys(self) -> Factors:
        """The queries alone, holding on to no keys (a slice of none would)."""
        batch, kv_heads, _, d = self.k.shape
        return replace(self, k=self.k.new_empty(batch, kv_heads, 0, d))

    def normal_product(
        self, x: Float[Tensor, "batch head width key"], rows_at_once: int | None = None
    ) -> Float[Tensor, "batch head width key"]:
        """A^T A x for a few vectors; rows are computed in blocks, so that the pattern is never all there.

        Args:
            x: [batch, head, width, key].
            rows_at_once: rows of a block; by default as many as make 2 million numbers, 64 at least.
        """
        batch, heads, n_query, _ = self.q.shape
        if rows_at_once is None:
            rows_at_once = max(64, (1 << 21) // max(1, batch * heads * self.k.shape[2]))
        out = torch.zeros_like(x)
        for low in range(0, n_query, rows_at_once):
            pattern = self[low : low + rows_at_once].pattern().to(x.dtype)
            n_key = pattern.shape[-1]
            out[..., :n_key] += (x[..., :n_key] @ pattern.mT) @ pattern
        return out

    def _products(self, q: Tensor, k: Tensor) -> Float[Tensor, "batch head query key"]:
        batch, heads, n_query, d = q.shape
        group = -(-heads // k.shape[1])
        if self.kv_head == tuple(head // group for head in range(heads)) and heads == group * k.shape[1]:
            # heads that share keys go through one product, without a copy of the keys
            grouped = q.reshape(batch, k.shape[1], group * n_query, d) @ k.mT
            return grouped.reshape(batch, heads, n_query, k.shape[2])
        # (an index list would travel to the device, and the host wait for it)
        return q @ torch.stack([k[:, head] for head in self.kv_head], 1).mT

    def _hidden(self, low: int, high: int) -> Tensor:
        """[batch or 1, query, key] keys low..high that a row does not see; padding is given one key to stand on."""
        key = torch.arange(low, high, device=self.q.device)
        position = self.position if self.padded else self.position[:1]
        position = position.clamp_min(0).unsqueeze(-1)
        hidden = key > position
        return hidden if self.window is None else hidden | (key <= position - self.window)


def joined(parts: Sequence[Factors]) -> Factors:
    """Chunks of rows of the same heads as one, in order; the last of them has all keys."""
    return replace(
        parts[-1],
        q=torch.cat([part.q for part in parts], 2),
        position=torch.cat([part.position for part in parts], 1),
        first=parts[0].first,
        padded=any(part.padded for part in parts),
    )
