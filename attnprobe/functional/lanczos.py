"""The second eigenvalue of many self-adjoint operators, by Lanczos iterations.

On an accelerator all matrices go through one block iteration together. On a CPU that would wait for memory: there each
matrix stays in the processor's cache while ARPACK iterates on it, which was measured to take half the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Vectors a pass: on a CPU three cost what one costs, fewer passes are needed, and more make the projected problems
# large. One could not tell a double eigenvalue.
_WIDTH = 3
# Steps after which convergence is looked at; what has not converged at the last one is solved densely.
_CHECKS = (8, 12, 18, 28, 44)
# Matrices that have converged are left behind once so few remain: leaving them means a copy of the others.
_SHRINK = 0.5
# Solved densely: not slower, and exact.
SMALL = 96
# Ritz pairs that may count as one cluster in the error bound.
_CLUSTER = 6


def eigenvalue_beside(matrix: Float[Tensor, "*batch n n"], known: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Largest eigenvalue of a positive semi-definite matrix on the complement of a known unit eigenvector.

    On a CPU: ARPACK (through scipy) on each matrix, to a relative residual of 5e-5 (float32) or 1e-12 (float64).

    Elsewhere: block Lanczos with full reorthogonalisation, all matrices together, from the same random directions every
    time; a matrix leaves the iteration when its value has converged. With the residual ||R|| of the first k Ritz pairs,
    the error of the largest Ritz value is at most ||R||^2 over the distance to the (k+1)-th value, for any k (the
    quadratic residual bound; k = 1 is that of Kato and Temple). It holds unless an eigenvalue not yet seen hides in the
    cluster, and then the residual itself bounds the error. The iteration ends where the best quadratic bound is below
    1e-5 (float32; 1e-11 in float64) of the value and the residual below 3e-4 (1e-9). On the heads of a real model the
    error was below 1e-6. Spectra too flat for that in 44 steps are solved densely.

    Args:
        matrix: [..., n, n] symmetric, non-negative spectrum.
        known: [..., n] unit eigenvector to leave out; zeros leave nothing out.

    Returns:
        [...], 0 where the complement is empty (n = 1).

    >>> import torch
    >>> from attnprobe.functional.lanczos import eigenvalue_beside
    >>> eigenvalue_beside(torch.diag(torch.tensor([3.0, 2.0, 1.0])), torch.tensor([1.0, 0.0, 0.0])).item()
    2.0
    """
    batch, n = matrix.shape[:-2], matrix.shape[-1]
    a, u = matrix.reshape(-1, n, n), known.reshape(-1, 1, n)
    if n <= SMALL:
        return _dense(a, u).reshape(batch)
    if a.device.type == "cpu":
        products = [matrix.__matmul__ for matrix in a.numpy()]
        return eigenvalue_beside_of(products, known.reshape(-1, n)).reshape(batch)
    return _block_lanczos(a, u).clamp_min(0.0).reshape(batch)


def eigenvalue_beside_of(
    products: Sequence[Callable[[np.ndarray], np.ndarray]], known: Float[Tensor, "batch n"]
) -> Float[Tensor, "batch"]:
    """`eigenvalue_beside` of operators that are known by what they do to a vector; on the CPU, by ARPACK.

    Args:
        products: x -> S x for every operator, on numpy vectors of the dtype of `known`.
        known: [batch, n] unit eigenvectors to leave out.

    Returns:
        [batch].
    """
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

    n = known.shape[-1]
    start = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(known.dtype).numpy()
    tolerance = 5e-5 if known.dtype == torch.float32 else 1e-12  # of the residual: the value is far closer
    values = []
    for product, one in zip(products, known.numpy(), strict=True):

        def beside(
            x: np.ndarray, product: Callable[[np.ndarray], np.ndarray] = product, one: np.ndarray = one
        ) -> np.ndarray:
            image: np.ndarray = product(x) - one * (one @ x)
            return image

        operator = LinearOperator((n, n), matvec=beside, dtype=one.dtype)
        try:
            found = eigsh(operator, k=1, which="LA", tol=tolerance, v0=start, return_eigenvectors=False)
            values.append(float(found[0]))
        except (ArpackError, TypeError):  # an operator that is 0, did not converge, or is too small for ARPACK
            matrix = torch.from_numpy(np.stack([product(unit) for unit in np.eye(n, dtype=one.dtype)]))
            values.append(float(_dense(matrix[None], torch.from_numpy(one)[None, None])[0]))
    return known.new_tensor(values).clamp_min(0.0)


def eigenvalue_beside_operator(
    product: Callable[[Float[Tensor, "*batch width n"]], Float[Tensor, "*batch width n"]],
    known: Float[Tensor, "*batch n"],
) -> Float[Tensor, "*batch"]:
    """`eigenvalue_beside` of operators that are known by what they do to a few vectors at once, all together.

    The same block Lanczos iteration. What has not converged at its last step is given by its largest Ritz value, which
    is below the eigenvalue by no more than its residual.

    Args:
        product: rows X -> X S for every operator.
        known: [..., n] unit eigenvectors to leave out.

    Returns:
        [...].
    """
    batch, n = known.shape[:-1], known.shape[-1]

    def flat(rows: Float[Tensor, "batch width n"]) -> Float[Tensor, "batch width n"]:
        return product(rows.reshape(*batch, *rows.shape[-2:])).reshape(rows.shape)

    u = known.reshape(-1, 1, n)
    if n <= SMALL:
        return _dense(flat(torch.eye(n, dtype=u.dtype, device=u.device).expand(u.shape[0], n, n)), u).reshape(batch)
    krylov = _Krylov(flat, u, u.squeeze(1) > 0)
    ritz = u.new_zeros(u.shape[0])
    for check in _CHECKS:
        if _WIDTH * check >= n:
            break
        krylov.advance(check)
        ritz, residual, error = krylov.largest()
        if bool(_converged(ritz, residual, error).all()):
            break
    return ritz.clamp_min(0.0).reshape(batch)


def _converged(ritz: Tensor, residual: Tensor, error: Tensor) -> Tensor:
    quadratic, linear = (1e-5, 3e-4) if ritz.dtype == torch.float32 else (1e-11, 1e-9)
    scale = ritz.clamp_min(torch.finfo(ritz.dtype).eps)
    return (error <= quadratic * scale) & (residual <= linear * scale)


def _block_lanczos(a: Float[Tensor, "batch n n"], u: Float[Tensor, "batch 1 n"]) -> Float[Tensor, "batch"]:
    n = a.shape[-1]
    value = a.new_full(a.shape[:1], torch.nan)
    going = torch.arange(a.shape[0], device=a.device)
    # rows times a symmetric matrix: the layout that reads the matrix in order
    krylov = _Krylov(a.__rmatmul__, u, a.diagonal(dim1=-2, dim2=-1) > 0)
    for check in _CHECKS:
        if _WIDTH * check >= n:
            break
        krylov.advance(check)
        ritz, residual, error = krylov.largest()
        converged = _converged(ritz, residual, error)
        value[going[converged]] = ritz[converged]
        still = ~converged
        left = int(still.sum())
        if left == 0:
            return value
        if left <= _SHRINK * len(going):
            going = going[still]
            krylov.keep(still, a[going].__rmatmul__)
    open_ = value.isnan()
    value[open_] = _dense(a[open_], u[open_])
    return value


_Product = Callable[[Tensor], Tensor]


class _Krylov:
    """Orthonormal rows spanning the Krylov space of each operator, beside the known vector, and their images.

    Args:
        product: rows X -> X S for every operator.
        u: the known vectors.
        lives: [batch, n] where the operator lives: keys that are dropped have empty rows.
    """

    def __init__(self, product: _Product, u: Float[Tensor, "batch 1 n"], lives: Bool[Tensor, "batch n"]) -> None:
        self.product = product
        batch, _, n = u.shape
        rows = 1 + _CHECKS[-1] * _WIDTH
        self.basis = u.new_empty(batch, min(rows, n + 1), n)
        self.images = torch.empty_like(self.basis)
        self.basis[:, :1] = u  # the known vector is row 0: what is orthogonal to the basis is beside it
        self.size = 1
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(_WIDTH, n, generator=generator, dtype=torch.float64).to(u)
        self._add(start * lives.unsqueeze(-2))

    def advance(self, steps: int) -> None:
        """Widen the space to that many steps."""
        while self.size < 1 + steps * _WIDTH:
            self._add(self.images[:, self.size - _WIDTH : self.size])

    def largest(self) -> tuple[Float[Tensor, "batch"], Float[Tensor, "batch"], Float[Tensor, "batch"]]:
        """Largest Ritz value, its residual, and the best quadratic bound of its error."""
        basis, images = self.basis[:, 1 : self.size], self.images[:, 1 : self.size]
        values, vectors = torch.linalg.eigh(basis @ images.mT)
        values, vectors = values.flip(-1)[:, : _CLUSTER + 1], vectors.flip(-1)[..., :_CLUSTER].mT
        residual = vectors @ images - values[:, :-1, None] * (vectors @ basis)
        squared = residual.square().sum(-1).cumsum(-1)
        gap = (values[:, :1] - values[:, 1:]).clamp_min(torch.finfo(values.dtype).tiny)
        return values[:, 0], squared[:, 0].sqrt(), (squared / gap).amin(-1)

    def keep(self, chosen: Tensor, product: _Product) -> None:
        """Go on with some of the operators."""
        self.product, self.basis, self.images = product, self.basis[chosen], self.images[chosen]

    def _add(self, rows: Float[Tensor, "batch width n"]) -> None:
        """Take in the rows, orthonormalised; zero rows where the space is exhausted."""
        basis = self.basis[:, : self.size]
        # What projecting leaves of a row that lay in the space already is rounding: a small part of the row.
        floor = (1e3 * torch.finfo(rows.dtype).eps) ** 2 * rows.square().sum((-2, -1)).unsqueeze(-1)
        for _ in range(2):  # once loses orthogonality in float32
            rows = torch.baddbmm(rows, torch.bmm(rows, basis.mT), basis, alpha=-1)
        wide = rows.double()  # a Gram matrix squares the condition
        values, vectors = torch.linalg.eigh(torch.bmm(wide, wide.mT))
        inverse = torch.where(values > floor, values.clamp_min(torch.finfo(torch.float64).tiny).rsqrt(), 0.0)
        rows = torch.bmm((vectors * inverse.unsqueeze(-2)).mT, wide).to(rows.dtype)
        high = self.size + _WIDTH
        self.basis[:, self.size : high] = rows
        self.images[:, self.size : high] = self.product(rows)
        self.size = high


def _dense(a: Float[Tensor, "batch n n"], u: Float[Tensor, "batch 1 n"]) -> Float[Tensor, "batch"]:
    deflated = a - (u @ a).mT @ u
    return torch.linalg.eigvalsh((deflated + deflated.mT) / 2)[..., -1].clamp_min(0.0)
