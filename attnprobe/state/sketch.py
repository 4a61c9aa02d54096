"""A random-sign sketch of the rows: what ||S||_F^2 is estimated from without the Gram matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnprobe.functional.factored import Factors
from attnprobe.functional.sketch import SignSketch, check_rank, sign_block
from attnprobe.kernels import sketch_rows
from attnprobe.rows import Rows
from attnprobe.state.statistic import Statistic, added

# Rows whose signs are made at once: rank numbers a row, and rows cut to the keys that they can reach.
_ROWS_AT_ONCE = 256
# The sketch grows by blocks of keys, so that no step copies it: this many, later an eighth of what there is.
_BLOCK = 128


class Sketch(Statistic):
    """Pi A with random signs Pi [rank, query], Pi 1 and Pi Pi^T. O(rank n) memory a head, O(rank n) time a row.

    The signs of a row are those of its position in its own sequence, so nothing depends on how rows come.

    Args:
        rank: number of sign rows.
        seed: of the signs.

    >>> import torch
    >>> from attnprobe import Rows
    >>> from attnprobe.state import Sketch
    >>> sketch = Sketch(rank=16)
    >>> sketch.update(Rows.from_pattern(torch.eye(3).reshape(1, 1, 3, 3)))
    >>> sketch.value.sums.shape, sketch.value.sign_gram[0, 0, 0, 0].item()
    (torch.Size([1, 1, 16, 3]), 3.0)
    """

    def __init__(self, rank: int = 128, seed: int = 0) -> None:
        check_rank(rank, seed)
        super().__init__()
        self.rank = rank
        self.seed = seed
        self._blocks: list[Float[Tensor, "batch head rank key"]] = []
        self._n_key = 0
        self._sign_sum: Tensor | None = None
        self._sign_gram: Tensor | None = None

    @property
    def value(self) -> SignSketch:
        """The sketch of all rows so far: sums [batch, head, rank, key], and the signs' own [batch, 1, ...].

        Raises:
            ValueError: no rows have come.
        """
        if self._sign_sum is None or self._sign_gram is None:
            raise ValueError("no rows have been seen yet: run the model, or call update, before reading results.")
        return SignSketch(torch.cat(self._blocks, -1)[..., : self._n_key], self._sign_sum, self._sign_gram)

    def prefixes(self, rows: Rows) -> Iterator[SignSketch]:
        """The sketch of the prefix that ends at each of these rows, without adding them.

        One copy is made and grows row by row: a value holds until the next one is asked for.
        """
        keys = rows.keys
        signs = self._signs(rows.position, keys.dtype)
        if self._sign_sum is None:
            sums = keys.new_zeros((*keys.shape[:2], self.rank, keys.shape[-1]))
            sign_sum, sign_gram = signs.new_zeros(signs.shape[:-1]), signs.new_zeros((*signs.shape[:-1], self.rank))
        else:
            sums, sign_sum, sign_gram = self.value
            sums = torch.nn.functional.pad(sums, (0, keys.shape[-1] - self._n_key))  # `value` is a copy
        for i in range(rows.n_query):
            sign = signs[..., i : i + 1]
            sums.addcmul_(sign, keys[..., i : i + 1, :])
            sign_sum, sign_gram = sign_sum + sign.squeeze(-1), sign_gram + sign * sign.mT
            yield SignSketch(sums, sign_sum, sign_gram)

    def _update(self, rows: Rows) -> None:
        if rows.unformed is not None:
            self._update_fused(rows, rows.unformed)
            return
        keys = rows.keys
        reach = rows.first + (rows.sink is not None) if rows.causal else None
        self._grow(keys, keys.shape[-1])
        for low in range(0, rows.n_query, _ROWS_AT_ONCE):
            high = min(low + _ROWS_AT_ONCE, rows.n_query)
            n_key = keys.shape[-1] if reach is None else min(reach + high, keys.shape[-1])
            signs = self._signs(rows.position[:, low:high], keys.dtype)
            self._add(signs, keys[..., low:high, :n_key])
            self._sign_sum = added(self._sign_sum, signs.sum(-1))
            self._sign_gram = added(self._sign_gram, signs @ signs.mT)

    def _update_fused(self, rows: Rows, factors: Factors) -> None:
        """The same without a pattern, on a GPU that has a kernel for it."""
        signs = self._signs(rows.position, factors.dtype)
        sums = sketch_rows(factors, signs.squeeze(1))
        self._grow(sums, rows.n_key)
        self._add_sums(sums)
        self._sign_sum = added(self._sign_sum, signs.sum(-1))
        self._sign_gram = added(self._sign_gram, signs @ signs.mT)

    def _add_sums(self, sums: Float[Tensor, "batch head rank key"]) -> None:
        first = 0
        for block in self._blocks:
            part = sums[..., first : first + block.shape[-1]]
            block[..., : part.shape[-1]] += part
            first += block.shape[-1]

    def _add(self, signs: Float[Tensor, "batch 1 rank row"], keys: Float[Tensor, "batch head row key"]) -> None:
        repeated = signs.expand(-1, keys.shape[1], -1, -1).flatten(0, 1)
        first = 0
        for block in self._blocks:
            part = keys[..., first : first + block.shape[-1]].flatten(0, 1)
            if part.shape[-1]:
                block.flatten(0, 1)[..., : part.shape[-1]].baddbmm_(repeated, part)
            first += block.shape[-1]

    def _merge(self, other: Statistic) -> None:
        assert isinstance(other, Sketch)
        if (self.rank, self.seed) != (other.rank, other.seed):
            raise ValueError(
                f"cannot merge a sketch of rank {other.rank} and seed {other.seed} into one of rank {self.rank} and "
                f"seed {self.seed}: their signs differ."
            )
        if other._sign_sum is None:
            return
        theirs = other.value
        self._grow(theirs.sums, other._n_key)
        self._add_sums(theirs.sums)
        self._sign_sum = added(self._sign_sum, theirs.sign_sum)
        self._sign_gram = added(self._sign_gram, theirs.sign_gram)

    def _signs(self, position: Int[Tensor, "batch row"], dtype: torch.dtype) -> Float[Tensor, "batch 1 rank row"]:
        return sign_block(position, self.rank, self.seed, dtype=dtype).unsqueeze(1)

    def _grow(self, like: Float[Tensor, "batch head row key"], n_key: int) -> None:
        room = sum(block.shape[-1] for block in self._blocks)
        while room < n_key or not self._blocks:
            width = _BLOCK * max(1, room // (8 * _BLOCK))
            self._blocks.append(like.new_zeros((*like.shape[:2], self.rank, width)))
            room += width
        self._n_key = max(self._n_key, n_key)
