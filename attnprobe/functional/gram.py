"""The Gram matrix G = A^T A of an attention pattern, and participation ratios of all its prefixes.

G is symmetric, so only its lower triangle is kept, in blocks of rows. A block touches memory once per update,
and for a causal pattern the rows that cannot reach a block are skipped: building G of n rows costs n^3/3
floating-point operations instead of 2 n^3.

For a prefix of the sequence only ||S||_F^2 = sum_jk G_jk^2 w_j w_k is wanted (w = 1/mu). With r rows pending on
top of a stored G it is, for every one of the r prefixes at once,

    w^T (G o G) w  +  2 sum_s x_s^T G x_s  +  sum_ss' (a_s^T diag(w) a_s')^2,      x_s = w o a_s

so one pass over G serves r rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnprobe.functional.measures import Measure, check_measured, key_weights
from attnprobe.functional.patterns import check_pattern, safe_divide

# Blocks have 64, 128 and then 192 rows: high enough that few products do the work, low enough that little lies above
# the diagonal, and small where the matrix is.
_HEIGHT, _STEPS = 64, 3
# Rows whose prefixes are valued in one pass: r rows need r + r(r+1)/2 products with G, so few rows waste
# passes over memory and many rows waste arithmetic; 8 was the fastest of 2, 4, 8, 16 at n = 512.
ROWS_PER_PASS = 8


class BlockGram:
    """G = sum over rows of a a^T, lower triangle in blocks, leading dimensions kept.

    Shapes: rows are [..., row, key]; the matrix grows with the keys it is shown.

    >>> import torch
    >>> gram = BlockGram()
    >>> gram.add_(torch.eye(3), causal_start=0)
    >>> gram.dense().tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    def __init__(self) -> None:
        self.size = 0
        self._capacity = 0
        self._blocks: list[Float[Tensor, "batch row key"]] = []
        self._leading: torch.Size | None = None

    def add_(self, rows: Float[Tensor, "*batch row key"], causal_start: int | None = None) -> None:
        """Add the rows. `causal_start` = s promises that row i has no mass beyond key s + i."""
        flat = self._flatten(rows)
        n_rows, n_keys = flat.shape[-2:]
        self._grow(n_keys, flat)
        for index, block in enumerate(self._blocks):
            low, high = _edge(index), min(_edge(index + 1), n_keys)
            if low >= n_keys:
                break
            first = 0 if causal_start is None else max(0, low - causal_start)
            if first < n_rows:
                reach = flat[:, first:, :high]
                if reach.requires_grad or block.requires_grad:  # autograd has kept the block as it was
                    block = self._blocks[index] = block.clone()
                block[:, : high - low, :high].baddbmm_(reach[..., low:].mT, reach)

    def merge_(self, other: BlockGram) -> None:
        """Add another Gram matrix of the same heads (other rows of the same sequences)."""
        if other.size == 0:
            return
        if self._leading is None:
            self._leading = other._leading
        if self._leading != other._leading:
            raise ValueError(
                f"cannot merge Gram matrices of leading shape {tuple(self._leading or ())} and "
                f"{tuple(other._leading or ())}: they watched different batches or heads."
            )
        self._grow(other.size, other._blocks[0])
        for index, theirs in enumerate(other._blocks):
            self._blocks[index][:, : theirs.shape[1], : theirs.shape[2]] += theirs

    def dense(self, scale: Float[Tensor, "*batch key"] | None = None) -> Float[Tensor, "*batch key key"]:
        """The full symmetric matrix [..., key, key], with rows and columns multiplied by `scale` if it is given."""
        if self._leading is None:
            raise ValueError("the Gram matrix has seen no rows: update it before reading it.")
        full = self._blocks[0].new_empty((self._blocks[0].shape[0], self.size, self.size))
        factor = None if scale is None else scale.reshape(-1, self.size)
        for low, high, block in self._known(self.size):
            if factor is not None:
                block = block * factor[:, low:high, None] * factor[:, None, :high]
            full[:, low:high, :high] = block
            full[:, :low, low:high] = block[..., :low].mT
        return full.reshape(*self._leading, self.size, self.size)

    def operators(
        self, scale: Float[Tensor, "*batch key"]
    ) -> list[Callable[[Float[np.ndarray, "key"]], Float[np.ndarray, "key"]]]:
        """x -> diag(scale) G diag(scale) x for every matrix, on numpy vectors; the half that is stored is read once."""
        factors = scale.reshape(-1, self.size).numpy()
        known = [(low, high, block.numpy()) for low, high, block in self._known(self.size)]
        return [
            _operator([(low, high, block[i]) for low, high, block in known], factor) for i, factor in enumerate(factors)
        ]

    def weighted_square(self, weights: Float[Tensor, "*batch row key"]) -> Float[Tensor, "*batch row"]:
        """sum_jk G_jk^2 w_j w_k for every weight vector [..., row, key]; keys beyond the matrix count as 0."""
        w = self._flatten(weights)
        total = w.new_zeros(w.shape[:-1])
        for low, high, block in self._known(w.shape[-1]):
            squared = block.square()
            products = squared[..., low:] @ w[..., low:high].mT
            if low:
                products.baddbmm_(squared[..., :low], w[..., :low].mT, alpha=2.0)
            total += torch.einsum("bkr,brk->br", products, w[..., low:high])
        return total.reshape(weights.shape[:-1])

    def quadratic(self, vectors: Float[Tensor, "*batch row key"]) -> Float[Tensor, "*batch row"]:
        """x^T G x for every vector [..., row, key]; keys beyond the matrix count as 0."""
        x = self._flatten(vectors)
        total = x.new_zeros(x.shape[:-1])
        for low, high, block in self._known(x.shape[-1]):
            products = block[..., low:] @ x[..., low:high].mT
            if low:
                products.baddbmm_(block[..., :low], x[..., :low].mT, alpha=2.0)
            total += torch.einsum("bkr,brk->br", products, x[..., low:high])
        return total.reshape(vectors.shape[:-1])

    def _known(self, n_keys: int) -> list[tuple[int, int, Tensor]]:
        """(low, high, block) of every block, cut to the keys that are both stored and asked for."""
        size = min(self.size, n_keys)
        cuts = []
        for index, block in enumerate(self._blocks):
            low, high = _edge(index), min(_edge(index + 1), size)
            if low < high:
                cuts.append((low, high, block[:, : high - low, :high]))
        return cuts

    def _flatten(self, rows: Tensor) -> Tensor:
        if self._leading is None:
            self._leading = rows.shape[:-2]
        return rows.reshape(math.prod(rows.shape[:-2]), *rows.shape[-2:])

    def _grow(self, n_keys: int, like: Tensor) -> None:
        while self._capacity < n_keys:
            index = max(len(self._blocks) - 1, 0)
            if self._capacity == _edge(index + 1):
                index += 1
            # the last block fills up by steps: a small copy now and then, in place of room for rows that never come
            high = min(_edge(index + 1), _HEIGHT * math.ceil(n_keys / _HEIGHT))
            block = like.new_zeros((like.shape[0], high - _edge(index), high))
            for before in self._blocks[index:]:
                block[:, : before.shape[1], : before.shape[2]] = before
            self._blocks[index:] = [block]
            self._capacity = high
        self.size = max(self.size, n_keys)


def _operator(
    blocks: list[tuple[int, int, np.ndarray]], scale: np.ndarray
) -> Callable[[Float[np.ndarray, "key"]], Float[np.ndarray, "key"]]:
    def product(x: np.ndarray) -> np.ndarray:
        x = scale * x
        y = np.empty_like(x)
        for low, high, block in blocks:
            y[low:high] = block @ x[:high]
            if low:
                y[:low] += x[low:high] @ block[:, :low]
        y *= scale
        return y

    return product


def _edge(index: int) -> int:
    """The first row of a block."""
    low = min(index, _STEPS)
    return _HEIGHT * (low * (low + 1) // 2 + (index - low) * _STEPS)


def prefix_key_weights(
    prefix_mass: Float[Tensor, "*batch row key"], count: Int[Tensor, "*batch row"], measure: Measure
) -> Float[Tensor, "*batch row key"]:
    """1/mu of every prefix, up to a factor a prefix: the participation ratio does not see it.

    `prefix_mass` is the column mass of each prefix, `count` its number of rows. A key without mass is outside
    the space and gets weight 0, and so does one whose mass has underflowed: its reciprocal would be infinite,
    while what it adds is smaller than rounding.
    """
    if isinstance(measure, Tensor):
        mu = measure.to(prefix_mass).unsqueeze(-2)
    elif measure == "intrinsic":
        mu = prefix_mass
    elif measure == "counting":
        mu = torch.ones_like(prefix_mass)
    else:
        mu = _uniform_causal_mass(prefix_mass.shape[-1], count).to(prefix_mass)
    inside = (mu >= torch.finfo(mu.dtype).tiny) & (prefix_mass > 0)
    return torch.where(inside, mu.clamp_min(torch.finfo(mu.dtype).tiny).reciprocal(), 0.0)


def _uniform_causal_mass(n_keys: int, count: Int[Tensor, "*batch row"]) -> Float[Tensor, "*batch row key"]:
    """Column mass of uniform causal attention over `count` rows: sum_{i >= j} 1/i for key j (1-based)."""
    position = torch.arange(1, n_keys + 1, dtype=torch.float64, device=count.device)
    harmonic = torch.cat([position.new_zeros(1), position.reciprocal().cumsum(0)])
    return (harmonic[count.clamp(max=n_keys)].unsqueeze(-1) - harmonic[:-1]).clamp_min(0.0)


def pending_square(
    gram: BlockGram,
    rows: Float[Tensor, "*batch row key"],
    weights: Float[Tensor, "*batch row key"],
) -> Float[Tensor, "*batch row"]:
    """||S||_F^2 of the prefix that ends at each pending row, without adding the rows to `gram`.

    weights[..., t, :] are the key weights 1/mu of the prefix that ends at row t (0 for a key that is dropped). One row
    of weights stands for all prefixes, and then r rows need r products with G in place of r + r(r+1)/2.
    """
    return pending_squares(gram, rows, [weights])[0]


def pending_squares(
    gram: BlockGram,
    rows: Float[Tensor, "*batch row key"],
    weights: Sequence[Float[Tensor, "*batch row key"]],
) -> list[Float[Tensor, "*batch row"]]:
    """`pending_square` for several sets of weights, in one pass over `gram`."""
    pending = [_Pending.under(rows, one) for one in weights]
    if gram.size:
        squares = _split(gram.weighted_square, [one.weights for one in pending])
        crosses = _split(gram.quadratic, [one.vectors for one in pending])
        for one, square, cross in zip(pending, squares, crosses, strict=True):
            one.total += square + 2 * one.per_prefix(cross)
    return [one.total for one in pending]


@dataclass
class _Pending:
    """Pending rows under one set of weights.

    Attributes:
        weights: [..., prefix or 1, key].
        vectors: [..., vector, key] the rows times the weights of a prefix, for every prefix that they are in.
        total: [..., prefix] what the pending rows are worth among themselves.
    """

    weights: Float[Tensor, "*batch prefix key"]
    vectors: Float[Tensor, "*batch vector key"]
    total: Float[Tensor, "*batch prefix"]

    @classmethod
    def under(cls, rows: Float[Tensor, "*batch row key"], weights: Float[Tensor, "*batch prefix key"]) -> _Pending:
        n_rows = rows.shape[-2]
        if weights.shape[-2] == 1:
            scaled = weights * rows
            among = (scaled @ rows.mT).square().cumsum(-1).cumsum(-2).diagonal(dim1=-2, dim2=-1)
            return cls(weights, scaled, among.clone())
        scaled = weights.unsqueeze(-2) * rows.unsqueeze(-3)  # [..., prefix, row, key]
        among = torch.einsum("...trk,...sk->...trs", scaled, rows)
        seen = torch.ones(n_rows, n_rows, dtype=torch.bool, device=rows.device).tril()
        among = among * (seen[:, None, :] & seen[:, :, None])
        prefix, row = torch.tril_indices(n_rows, n_rows, device=rows.device)
        return cls(weights, scaled[..., prefix, row, :], among.square().sum((-2, -1)))

    def per_prefix(self, value: Float[Tensor, "*batch vector"]) -> Float[Tensor, "*batch prefix"]:
        """The sum over the vectors of each prefix."""
        n_rows = self.total.shape[-1]
        if value.shape[-1] == n_rows:  # each row once, for all prefixes
            return value.cumsum(-1)
        prefix, _ = torch.tril_indices(n_rows, n_rows, device=value.device)
        return torch.zeros_like(self.total).index_add_(-1, prefix, value)


def _split(
    function: Callable[[Float[Tensor, "*batch row key"]], Float[Tensor, "*batch row"]], parts: Sequence[Tensor]
) -> Sequence[Float[Tensor, "*batch row"]]:
    """The function of several stacks of vectors, called once."""
    return function(torch.cat(list(parts), -2)).split([part.shape[-2] for part in parts], -1)


def prefix_participation_ratio(
    pattern: Float[Tensor, "*batch query key"],
    measure: Measure = "intrinsic",
    *,
    rows: str = "error",
    mask: Tensor | None = None,
) -> Float[Tensor, "*batch query"]:
    """Participation ratio of every leading block A[:t, :t] of a causal pattern, t = 1..n.

    Args:
        pattern: [..., n, n] causal pattern, rows sum to 1.
        measure: as in `participation_ratio`.
        rows, mask: as in `check_pattern`.

    Returns:
        [..., n], each in (0, 1] for the intrinsic measure; NaN past the end of a masked sequence.

    Raises:
        ValueError: the pattern is not a causal square pattern of distributions.

    >>> import torch
    >>> from attnprobe.functional import prefix_participation_ratio
    >>> prefix_participation_ratio(torch.eye(3)).tolist()
    [1.0, 1.0, 1.0]

    Source: [SG] the participation ratio of the Token Difference Operator, at the prefix of each token.
    """
    check_pattern(pattern, rows=rows, mask=mask, square=True, causal=True, why=_WHY_SQUARE)
    checked = check_measured(pattern, measure, rows=rows, mask=mask)
    a, length = checked.pattern, checked.length
    if isinstance(measure, Tensor):
        measure = key_weights(checked, measure).key  # in the order of the aligned columns
    n = a.shape[-1]
    position = torch.arange(n, device=a.device)
    gram = BlockGram()
    mass = a.new_zeros((*a.shape[:-2], n))
    energy = torch.zeros_like(mass)
    ratios = []
    for start in range(0, n, ROWS_PER_PASS):
        chunk = a[..., start : start + ROWS_PER_PASS, :]
        stop = start + chunk.shape[-2]
        ratios += prefix_ratio_of_rows(gram, mass, energy, chunk, position[start:stop], [measure])
        gram.add_(chunk[..., :stop], causal_start=start)
        mass = mass + chunk.sum(-2)
        energy = energy + chunk.square().sum(-2)
    ratio = torch.cat(ratios, -1)
    return torch.where(position < length.unsqueeze(-1), ratio, torch.nan)


_WHY_SQUARE = "a prefix is a leading block of queries and keys"


def prefix_ratio_of_rows(
    gram: BlockGram,
    mass: Float[Tensor, "*batch key"],
    energy: Float[Tensor, "*batch key"],
    rows: Float[Tensor, "*batch row key"],
    position: Int[Tensor, "*batch row"],
    measures: Sequence[Measure] = ("intrinsic",),
) -> list[Float[Tensor, "*batch row"]]:
    """Participation ratios of the prefix that ends at each of a few new rows, one for each measure.

    Args:
        gram, mass, energy: G, column mass and column energy of the rows before these.
        rows: [..., row, key] the new rows, in order.
        position: 0-based position of each row, so that its prefix has position + 1 rows.
        measures: of each ratio.
    """
    prefix_mass = mass.unsqueeze(-2) + rows.cumsum(-2)
    prefix_energy = energy.unsqueeze(-2) + rows.square().cumsum(-2)
    count = position + 1
    weights = [_weights_of_prefixes(prefix_mass, count, measure) for measure in measures]
    ratios = []
    for one, square in zip(weights, pending_squares(gram, rows, weights), strict=True):
        trace = (prefix_energy * one).sum(-1)
        # a block without mass (all of it underflowed to the prompt) routes nothing: 0, not 0/0
        ratios.append(safe_divide(trace.square(), count * square))
    return ratios


def _weights_of_prefixes(
    prefix_mass: Float[Tensor, "*batch row key"], count: Int[Tensor, "*batch row"], measure: Measure
) -> Float[Tensor, "*batch prefix key"]:
    """Key weights of every prefix; one row of them where a key has the same weight in whatever prefix it is."""
    if isinstance(measure, Tensor) or measure == "counting":
        return prefix_key_weights(prefix_mass[..., -1:, :], count[..., -1:], measure)
    return prefix_key_weights(prefix_mass, count, measure)
