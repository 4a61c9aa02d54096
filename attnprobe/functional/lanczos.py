"""The second eigenvalue of many self-adjoint operators at once, by the Lanczos iteration."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_CHECK_EVERY = 8
_MAX_STEPS = 160


def eigenvalue_beside(
    matrix: Float[Tensor, "*batch n n"], known: Float[Tensor, "*batch n"]
) -> Float[Tensor, "*batch"]:
    """Largest eigenvalue of a positive semi-definite matrix on the complement of a known unit eigenvector.

    Lanczos with full reorthogonalisation, all matrices together, until the residual of every Ritz pair is below
    1e-5 (float32) or 1e-10 (float64) of its value; an eigenvalue lies within the residual, so that bounds the
    error. Matrices that do not get there in 160 steps (flat spectra without a gap) are solved densely.

    Args:
        matrix: [..., n, n] symmetric, non-negative spectrum.
        known: [..., n] unit eigenvector to leave out; zeros leave nothing out.

    Returns:
        [...], 0 where the complement is empty (n = 1).
    """
    batch, n = matrix.shape[:-2], matrix.shape[-1]
    a, u = matrix.reshape(-1, n, n), known.reshape(-1, n)
    value, converged = _lanczos(a, u)
    if not bool(converged.all()):
        open_ = ~converged
        deflated = a[open_] - (a[open_] @ u[open_].unsqueeze(-1)) * u[open_].unsqueeze(-2)
        value[open_] = torch.linalg.eigvalsh(deflated)[..., -1]
    return value.clamp_min(0.0).reshape(batch)


def _lanczos(a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    n = a.shape[-1]
    tolerance = 1e-5 if a.dtype == torch.float32 else 1e-10
    steps = min(n, _MAX_STEPS)
    basis = a.new_zeros(a.shape[0], steps, n)
    diagonal = a.new_zeros(a.shape[0], steps)
    off = a.new_zeros(a.shape[0], steps)
    vector = _unit(_project_out(_start(a), u), a.new_tensor(1.0))
    value = a.new_zeros(a.shape[0])
    converged = torch.zeros_like(value, dtype=torch.bool)
    for step in range(steps):
        basis[:, step] = vector
        image = torch.bmm(a, vector.unsqueeze(-1)).squeeze(-1)
        diagonal[:, step] = (image * vector).sum(-1)
        seen = basis[:, : step + 1]
        for _ in range(2):  # once loses orthogonality in float32
            image = _project_out(image, u)
            image = image - (seen.mT @ (seen @ image.unsqueeze(-1))).squeeze(-1)
        off[:, step] = image.norm(dim=-1)
        if (step + 1) % _CHECK_EVERY == 0 or step + 1 == steps:
            value, residual = _ritz(diagonal[:, : step + 1], off[:, : step + 1])
            converged = residual <= tolerance * value.clamp_min(torch.finfo(a.dtype).eps)
            if bool(converged.all()):
                break
        vector = _unit(image, value_scale=off[:, : step + 1].amax(-1))
    # n steps span the whole complement: what is left is rounding
    return value, converged | (steps == n)


def _start(a: Tensor) -> Tensor:
    """The same random direction every time, so that results repeat."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(a.shape[-1], generator=generator, dtype=torch.float64).to(a)
    # only where the operator lives: keys that are dropped have empty rows
    return vector * (a.diagonal(dim1=-2, dim2=-1) > 0)


def _project_out(x: Tensor, u: Tensor) -> Tensor:
    return x - (x * u).sum(-1, keepdim=True) * u


def _unit(x: Tensor, value_scale: Tensor) -> Tensor:
    """x / ||x||, or zeros once the Krylov space is exhausted: then every further step adds a zero row."""
    norm = x.norm(dim=-1, keepdim=True)
    alive = norm > 10 * torch.finfo(x.dtype).eps * value_scale.unsqueeze(-1).clamp_min(1e-30)
    return torch.where(alive, x / norm.clamp_min(torch.finfo(x.dtype).tiny), 0.0)


def _ritz(diagonal: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
    """Largest eigenvalue of the tridiagonal matrix and the residual of its Ritz pair."""
    matrix = torch.diag_embed(diagonal)
    if diagonal.shape[-1] > 1:
        matrix = matrix + torch.diag_embed(off[:, :-1], 1) + torch.diag_embed(off[:, :-1], -1)
    values, vectors = torch.linalg.eigh(matrix)
    return values[:, -1], off[:, -1] * vectors[:, -1, -1].abs()
