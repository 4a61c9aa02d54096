"""Checking and aligning attention patterns: the gate every public function goes through.

Axes: `*batch` any leading dimensions (layers, sequences, heads), `query` rows, `key` columns, `token`
positions of a self-attention sequence, where queries and keys are the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

ROW_POLICIES = ("error", "renormalize", "sink")

# How far from 1 a row sum may be: what softmax in float32, rounded to the dtype, can leave over long rows.
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 1e-2, torch.float32: 1e-3, torch.float64: 1e-6}


@dataclass(frozen=True, eq=False)
class CheckedPattern:
    """A pattern that has passed `check_pattern`, with the real tokens first.

    Attributes:
        pattern: [..., query, key], float32 or float64. Rows past `length` and columns past `key_length` are
            zero.
        length: [...] number of real rows (n in every formula).
        key_length: [...] number of real columns, the sink included.
        order: [..., token] where each aligned position stood in the input; None without a mask.
        sink: column 0 is the extra key of `rows="sink"`.
    """

    pattern: Float[Tensor, "*batch query key"]
    length: Int[Tensor, "*batch"]
    key_length: Int[Tensor, "*batch"]
    order: Int[Tensor, "*batch token"] | None
    sink: bool

    @property
    def batch(self) -> torch.Size:
        """The leading dimensions."""
        return self.pattern.shape[:-2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype results are returned in."""
        return self.pattern.dtype

    @property
    def real_rows(self) -> Bool[Tensor, "*batch query"]:
        """Which aligned rows are real tokens."""
        return _first(self.length, self.pattern.shape[-2])

    def align_keys(self, per_key: Float[Tensor, "*batch key d"], what: str) -> Float[Tensor, "*batch key d"]:
        """Give values that stand beside the input's keys the order of the pattern's columns.

        Leading dimensions are broadcast, padded keys become 0 whatever they held (NaN included), and the
        sink, which carries no value, becomes a row of zeros.
        """
        n_key = self.pattern.shape[-1] - self.sink
        if per_key.shape[-2] != n_key:
            raise ValueError(
                f"{what} must have one entry for each of the {n_key} keys of the pattern, but its shape is "
                f"{tuple(per_key.shape)}."
            )
        try:
            per_key = per_key.expand(*self.batch, *per_key.shape[-2:])
        except RuntimeError:
            raise ValueError(
                f"the leading dimensions of {what}, {tuple(per_key.shape[:-2])}, cannot be broadcast to "
                f"those of the pattern, {tuple(self.batch)}; repeat shared key/value heads before the call."
            ) from None
        if self.order is not None:
            real = _first(self.length, n_key).unsqueeze(-1)
            per_key = torch.take_along_dim(per_key, self.order.unsqueeze(-1), dim=-2).where(real, 0.0)
        return pad(per_key, (0, 0, 1, 0)) if self.sink else per_key


def check_pattern(
    pattern: Float[Tensor, "*batch query key"],
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
    square: bool = False,
    causal: bool = False,
    what: str = "pattern",
    why: str = "the definition pairs every query with the key of the same token",
) -> CheckedPattern:
    """Check that `pattern` is attention, remove padding, and return it in float32 or float64.

    Args:
        pattern: [..., query, key] post-softmax attention.
        rows: what to do with rows that do not sum to 1. `"error"` refuses them; `"renormalize"` divides each
            row by its sum (a block cut out of a pattern); `"sink"` gives the missing mass 1 - sum to one
            extra key, prepended as column 0 (models with a learned sink or a zero-valued "attend to
            nothing").
        mask: [..., token] bool, True = real token, for square self-attention patterns; one leading dimension
            for each of the pattern's (1 where they share it), or none at all. Padded queries and keys are
            removed: real tokens move to the front, in order.
        square: the definition needs n_query == n_key; `why` is the clause that tells the user so.
        causal: the definition needs zeros above the diagonal. Implies nothing about `square`.
        what: what the sentences of errors call the tensor.

    Raises:
        TypeError: not a tensor, not float16, bfloat16, float32 or float64, or a mask that is not bool.
        ValueError: anything else that is wrong, in one sentence that names the place.

    >>> import torch
    >>> from attnprobe.functional import check_pattern
    >>> block = torch.tensor([[1.0, 0.0], [0.25, 0.25]])
    >>> check_pattern(block, rows="renormalize").pattern.tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    >>> check_pattern(block, rows="sink").pattern.tolist()
    [[0.0, 1.0, 0.0], [0.5, 0.25, 0.25]]
    """
    _check_form(pattern, rows, square, what, why)
    tolerance = row_tolerance(pattern.dtype)
    weights = pattern if pattern.dtype == torch.float64 else pattern.float()
    batch, n_query, n_key = weights.shape[:-2], weights.shape[-2], weights.shape[-1]
    real = None
    if mask is not None:
        real = _check_mask(mask, weights, what)
        # A padded query may hold anything, NaN included: it is not looked at.
        weights = weights.where(real.unsqueeze(-1), 0.0)
    _check_entries(weights, what)
    if real is not None:
        weights = _without_padded_keys(weights, real, tolerance, what)
    _check_sums(weights, rows, real, tolerance, what)
    if causal:
        _check_causal(weights, what)

    order = None
    length = torch.full(batch, n_query, dtype=torch.int64, device=weights.device)
    key_length = torch.full_like(length, n_key)
    if real is not None:
        order = torch.argsort((~real).to(torch.uint8), dim=-1, stable=True)
        length = key_length = real.sum(-1)
        weights = torch.take_along_dim(weights, order.unsqueeze(-1), dim=-2)
        weights = torch.take_along_dim(weights, order.unsqueeze(-2), dim=-1)
    weights = _apply_policy(weights, rows, _first(length, n_query))
    return CheckedPattern(weights, length, key_length + (rows == "sink"), order, rows == "sink")


def row_tolerance(dtype: torch.dtype) -> float:
    """How far from 1 a row sum of this dtype may be."""
    return _TOLERANCE[dtype]


def inverse_root(weight: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch key"]:
    """weight^-1/2, and 0 where the weight is 0: keys without weight are outside the space."""
    root = weight.sqrt()
    # Taken after the root: a denormal weight has a finite 1/sqrt but an infinite reciprocal.
    return root.reciprocal().where(root > 0, 0.0)


def safe_divide(numerator: Tensor, denominator: Tensor, otherwise: float = 0.0) -> Tensor:
    """numerator / denominator where the denominator is positive, `otherwise` elsewhere."""
    inside = denominator > 0
    return (numerator / denominator.where(inside, 1.0)).where(inside, otherwise)


def _first(length: Int[Tensor, "*batch"], n: int) -> Bool[Tensor, "*batch position"]:
    return torch.arange(n, device=length.device) < length.unsqueeze(-1)


def _check_form(pattern: Tensor, rows: str, square: bool, what: str, why: str) -> None:
    if not isinstance(pattern, Tensor):
        raise TypeError(
            f"{what} must be a torch tensor, not {type(pattern).__name__}; convert it with torch.as_tensor."
        )
    if pattern.dtype not in _TOLERANCE:
        raise TypeError(
            f"{what} must be float16, bfloat16, float32 or float64, not {pattern.dtype}; pass the post-softmax weights."
        )
    if rows not in ROW_POLICIES:
        raise ValueError(f"rows={rows!r} is not a row policy; use one of {', '.join(map(repr, ROW_POLICIES))}.")
    if pattern.ndim < 2:
        raise ValueError(
            f"{what} must have shape [..., n_query, n_key], but its shape is {tuple(pattern.shape)}; a "
            "single row is pattern[None, :]."
        )
    n_query, n_key = pattern.shape[-2:]
    if n_query == 0 or n_key == 0:
        raise ValueError(
            f"{what} has {n_query} queries and {n_key} keys, and nothing is defined without at least one of each."
        )
    if square and n_query != n_key:
        raise ValueError(
            f"{what} must be square, but it has {n_query} queries and {n_key} keys (cross-attention, or "
            f"rows of a cached decode step): {why}; pass the whole self-attention pattern."
        )
    if square and rows == "sink":
        raise ValueError(
            f"rows='sink' adds a key, so {what} would no longer be square: {why}; use rows='renormalize' instead."
        )


def _check_mask(mask: Tensor, pattern: Tensor, what: str) -> Bool[Tensor, "*batch token"]:
    """The mask, expanded to the leading dimensions of the pattern."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor (True = real token), not {kind}; pass attention_mask.bool().")
    n_query, n_key = pattern.shape[-2:]
    if n_query != n_key:
        raise ValueError(
            f"mask marks the tokens of a square self-attention pattern, but {what} has {n_query} queries "
            f"and {n_key} keys; cut the padded rows and columns off before the call."
        )
    batch = pattern.shape[:-2]
    fits = mask.ndim == 1 or (
        mask.ndim == pattern.ndim - 1 and all(m in (1, b) for m, b in zip(mask.shape[:-1], batch, strict=True))
    )
    # Plain broadcasting would line up a [sequence, token] mask with the heads of [sequence, head, n, n].
    if mask.ndim == 0 or mask.shape[-1] != n_key or not fits:
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} does not fit {what} of shape {tuple(pattern.shape)}; it "
            "must be [token] or have one leading dimension for each of the pattern's, 1 where they share "
            "it: mask[:, None, :] for [sequence, head, n, n]."
        )
    real = mask.to(pattern.device).expand(*batch, n_key)
    empty = ~real.any(-1)
    if empty.any():
        raise ValueError(f"every token of {_where(empty, ())} is masked out; drop sequences without a real token.")
    return real


def _check_entries(weights: Tensor, what: str) -> None:
    bad = ~weights.isfinite()
    if bad.any():
        raise ValueError(
            f"{what} has a NaN or infinite entry at {_where(bad, ('row', 'column'))}; if that row is a "
            "padded query, pass mask= (True = real token)."
        )
    bad = weights < 0
    if bad.any():
        raise ValueError(
            f"{what} has a negative entry at {_where(bad, ('row', 'column'))}; pass the weights after the softmax."
        )


def _check_sums(weights: Tensor, rows: str, real: Tensor | None, tolerance: float, what: str) -> None:
    sums = weights.sum(-1)
    if real is not None:
        sums = sums.where(real, 1.0)
    bad = sums == 0
    if bad.any():
        raise ValueError(
            f"{what} has an all-zero row at {_where(bad, ('row',))}; if that is a padded query, pass mask= "
            "(True = real token)."
        )
    bad = sums > 1 + tolerance
    if bad.any():
        raise ValueError(
            f"rows of {what} must sum to 1, but {_where(bad, ('row',))} sums to {_value(sums, bad)}, more "
            "than any row policy can mend; pass the weights of one head after the softmax."
        )
    bad = sums < 1 - tolerance
    if rows == "error" and bad.any():
        raise ValueError(
            f"rows of {what} must sum to 1 within {tolerance:g}, but {_where(bad, ('row',))} sums to "
            f"{_value(sums, bad)}; use rows='renormalize' to divide each row by its sum, or rows='sink' to "
            "give the missing mass to an extra key."
        )


def _without_padded_keys(weights: Tensor, real: Tensor, tolerance: float, what: str) -> Tensor:
    leak = weights.where(~real.unsqueeze(-2), 0.0).sum(-1)
    bad = leak > tolerance
    if bad.any():
        raise ValueError(
            f"{what} puts mass {_value(leak, bad)} on masked keys at {_where(bad, ('row',))}; the mask and "
            "the pattern disagree: check the padding side."
        )
    return weights.where(real.unsqueeze(-2), 0.0)


def _check_causal(weights: Tensor, what: str) -> None:
    bad = weights.triu(1) > 0
    if bad.any():
        raise ValueError(
            f"{what} must be causal, but it is not zero above the diagonal at "
            f"{_where(bad, ('row', 'column'))}; this quantity is defined for causal self-attention only."
        )


def _apply_policy(weights: Tensor, rows: str, real_rows: Tensor) -> Tensor:
    if rows == "renormalize":
        return weights / weights.sum(-1, keepdim=True).where(real_rows.unsqueeze(-1), 1.0)
    if rows == "sink":
        missing = (1 - weights.sum(-1)).clamp_min(0.0).where(real_rows, 0.0)
        return torch.cat([missing.unsqueeze(-1), weights], -1)
    return weights


def _where(bad: Bool[Tensor, "*axes"], axes: tuple[str, ...]) -> str:
    """The first place where `bad` is True, in words: "head (0, 3), row 17"."""
    index = bad.nonzero()[0].tolist()
    leading, rest = index[: len(index) - len(axes)], index[len(index) - len(axes) :]
    words = [f"{axis} {i}" for axis, i in zip(axes, rest, strict=True)]
    if leading:
        words.insert(0, f"head ({', '.join(map(str, leading))})")
    return ", ".join(words) or "the sequence"


def _value(numbers: Tensor, bad: Tensor) -> str:
    return f"{numbers[bad][0].item():.6g}"
