"""First and second moments of the head outputs z = A V."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnprobe.rows import Rows
from attnprobe.state.statistic import Statistic


class OutputMoments(Statistic):
    """Mean and scatter of z_i over rows, merged chunk by chunk without cancellation. O(d^2) memory a head.

    The scatter of a union is the sum of scatters plus the spread between the two means (Chan, Golub and LeVeque
    1983), so that it never comes out as a small difference of large sums.

    Attributes:
        count: [batch] rows; mean: [batch, head, d]; scatter: [batch, head, d, d] = sum (z - mean)(z - mean)^T.
    """

    def __init__(self) -> None:
        super().__init__()
        self._moments: Moments | None = None

    @property
    def count(self) -> Int[Tensor, "batch"]:
        return self._seen()[0]

    @property
    def mean(self) -> Float[Tensor, "batch head d"]:
        return self._seen()[1]

    @property
    def covariance(self) -> Float[Tensor, "batch head d d"]:
        """scatter / count."""
        count, _, scatter = self._seen()
        return scatter / count[:, None, None, None]

    def prefixes(self, rows: Rows) -> Moments:
        """Moments of the prefix that ends at each of these rows: [batch, query, ...] in front."""
        n_query = rows.n_query
        out: list[Moments] = []
        moments = self._moments
        for i in range(n_query):
            moments = _union(moments, _moments_of(rows[i : i + 1]))
            out.append(moments)
        count, mean, scatter = (torch.stack(part, 1) for part in zip(*out, strict=True))
        return count, mean, scatter

    def _update(self, rows: Rows) -> None:
        self._moments = _union(self._moments, _moments_of(rows))

    def _merge(self, other: Statistic) -> None:
        assert isinstance(other, OutputMoments)
        if other._moments is not None:
            self._moments = _union(self._moments, other._moments)

    def _seen(self) -> Moments:
        if self._moments is None:
            raise ValueError("no rows have been seen yet: run the model, or call update, first.")
        return self._moments


Moments = tuple[Tensor, Tensor, Tensor]


def _moments_of(rows: Rows) -> Moments:
    if rows.z is None:
        raise ValueError("head outputs are needed and these rows carry none: pass z (the hook `hook_z`).")
    valid = rows.valid[:, :, None, None]
    z = torch.where(valid, rows.z, 0.0) if rows.padded else rows.z
    count = rows.count
    mean = z.sum(1) / count.clamp_min(1)[:, None, None]
    centered = z - mean[:, None]
    if rows.padded:
        centered = torch.where(valid, centered, 0.0)
    centered = centered.transpose(1, 2)
    return count, mean, centered.mT @ centered


def _union(a: Moments | None, b: Moments) -> Moments:
    if a is None:
        return b
    (n_a, mean_a, scatter_a), (n_b, mean_b, scatter_b) = a, b
    total = n_a + n_b
    share = (n_b.to(mean_a) / total.clamp_min(1))[:, None, None]
    gap = mean_b - mean_a
    spread = (n_a.to(mean_a)[:, None, None] * share * gap).unsqueeze(-1) * gap.unsqueeze(-2)
    return total, mean_a + share * gap, scatter_a + scatter_b + spread
