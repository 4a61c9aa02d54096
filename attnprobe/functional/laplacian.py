"""Eigenvalues of the attention Laplacian, which for a causal pattern stand on its diagonal."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnprobe.functional.patterns import check_pattern


def laplacian_eigenvalues(
    pattern: Float[Tensor, "*batch query key"],
    *,
    rows: str = "error",
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch key"]:
    """Eigenvalues of the Laplacian of a causal pattern, one for every token.

        L_ii = (sum_{u >= i} a_ui) / (n - i) - a_ii         (i = 0..n-1)

    The Laplacian of a triangular pattern is triangular, so these are its eigenvalues.

    Args:
        pattern: [..., n, n] causal, rows sum to 1.
        rows, mask: as in `check_pattern`; `rows="sink"` is refused.

    Returns:
        [..., n] in position order, each in [-1, 1]; NaN past the end of a masked sequence. The features of
        the source are these, sorted in descending order, the first k.

    Raises:
        ValueError: not a causal square pattern (`check_pattern`).

    >>> import torch
    >>> from attnprobe.functional import laplacian_eigenvalues
    >>> laplacian_eigenvalues(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [-0.25, 0.0]

    Source: [LE] the definition of the Laplacian.
    """
    checked = check_pattern(
        pattern,
        rows=rows,
        mask=mask,
        square=True,
        causal=True,
        why="token i is both the query and the key of L_ii",
    )
    weights, length = checked.pattern, checked.length.unsqueeze(-1)
    position = torch.arange(weights.shape[-1], device=weights.device)
    attending = (length - position).clamp_min(1)
    eigenvalues = weights.sum(-2) / attending - weights.diagonal(dim1=-2, dim2=-1)
    return eigenvalues.where(position < length, torch.nan)
