"""An analyzer that keeps the rows it is given, and the patterns they add up to."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import attnprobe as ap


class Kept(list):
    """The rows of every started analyzer, in the order of starting; copies of the analyzer share it."""

    def __deepcopy__(self, memo: object) -> Kept:
        return self


class Capture(ap.Analyzer):
    """Keeps every chunk of rows. `patterns()` gives them as whole matrices in position space, a site each."""

    def __init__(self, *needs: str) -> None:
        super().__init__()
        self.needs = ("pattern", *needs)
        self.kept = Kept()

    def start(self, pool=None, leverage=None):
        fresh = super().start(pool, leverage)
        fresh.rows = []
        self.kept.append(fresh.rows)
        return fresh

    def update(self, rows: ap.Rows) -> None:
        tensors = {k: v.clone() for k, v in vars(rows).items() if isinstance(v, Tensor)}
        self.rows.append(replace(rows, **tensors))
        self.accumulate(rows=rows.count)

    def compute(self) -> dict[str, Tensor]:
        heads = self.rows[0].pattern.shape[1]
        return {"rows": self.total["rows"].float()[:, None].expand(-1, heads)}

    def sites(self, call: int, n_sites: int) -> list[list[ap.Rows]]:
        """The rows of one call's sequences, site by site."""
        return self.kept[call * n_sites : (call + 1) * n_sites]

    def patterns(self, n_sites: int, call: int = 0) -> list[Tensor]:
        return [whole(rows) for rows in self.sites(call, n_sites)]


def whole(chunks: list[ap.Rows], name: str = "pattern") -> Tensor:
    """[batch, head, position, key] from rows in any chunking; -1 where no row stands."""
    batch, heads = chunks[0].pattern.shape[:2]
    n_query = max(int(rows.position.max()) for rows in chunks) + 1
    n_key = max(rows.pattern.shape[-1] for rows in chunks)
    out = torch.full((batch, heads, n_query, n_key), -1.0)
    for rows in chunks:
        value = getattr(rows, name)
        for i, j in (rows.position >= 0).nonzero().tolist():
            row = out[i, :, rows.position[i, j]]
            assert (row == -1).all(), "a row came twice"
            row.zero_()
            row[:, : value.shape[-1]] = value[i, :, j]
    return out


def assert_pattern(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """One sequence: the captured pattern [head, n, key] starts with the expected [head, n, n], the rest is empty."""
    n_query, n_key = expected.shape[-2:]
    torch.testing.assert_close(found[:, :n_query, :n_key].float(), expected.float(), rtol=0, atol=tolerance)
    rest = found[:, :n_query, n_key:]
    assert (rest <= 0).all(), "mass beyond the keys of the sequence"
    assert (found[:, n_query:] == -1).all(), "rows beyond the sequence"
