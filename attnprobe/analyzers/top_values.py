"""The largest of what every token has: Laplacian eigenvalues and attention to oneself."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.analyzers.base import Analyzer
from attnprobe.functional.laplacian import eigenvalues_from_columns
from attnprobe.functional.top_values import check_top, top_values
from attnprobe.rows import Rows
from attnprobe.state import Columns, Diagonal

_SOURCE = "LapEigvals (arXiv 2502.17598)"


class _TopValues(Analyzer):
    """The k largest of one value a token: `<name>_1` to `<name>_<k>`."""

    _name: str
    _what: str

    def __init__(self, k: int = 16, *, trace: bool = False, stride: int = 1) -> None:
        super().__init__(trace=trace, stride=stride)
        check_top(k)
        self.k = k

    @property
    def names(self) -> tuple[str, ...]:
        """What the results are called, the largest first."""
        return tuple(f"{self._name}_{i}" for i in range(1, self.k + 1))

    @property
    def variables(self) -> dict[str, dict[str, str]]:  # type: ignore[override] # names depend on the settings here
        """Descriptions of the results."""
        return {
            name: {"long_name": f"{self._what}, number {i} from the largest", "units": "1", "source": _SOURCE}
            for i, name in enumerate(self.names, 1)
        }

    def compute(self) -> dict[str, Tensor]:
        return dict(zip(self.names, top_values(self._values(), self.k).unbind(-1), strict=True))

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        values = super().trace_rows(rows)
        return {name: value.where(rows.valid.unsqueeze(1), torch.nan) for name, value in values.items()}

    def _values(self) -> Float[Tensor, "batch head key"]:
        """One value a token, NaN past the end of a sequence."""
        raise NotImplementedError


class TopLaplacianEigenvalues(_TopValues):
    """The k largest eigenvalues of the attention Laplacian, L_ii = (sum_{u >= i} A_ui) / (n - i) - A_ii, descending.

    Results: `laplacian_eigenvalue_1` to `laplacian_eigenvalue_<k>`, each in [-1, 1]; NaN where a text has fewer
    tokens. O(n) memory a head, O(n) time a row.

    Args:
        k: how many.
        trace: keep those of the prefix at every step; stride: at every stride-th, held between.

    Raises:
        ValueError: k is no whole number of at least 1, a site that is not causal self-attention, or rows under the
            policy "sink".

    >>> import torch
    >>> from attnprobe import Rows, TopLaplacianEigenvalues
    >>> top = TopLaplacianEigenvalues(k=1)
    >>> top.update(Rows.from_pattern(torch.tensor([[1.0, 0.0], [0.5, 0.5]]).reshape(1, 1, 2, 2)))
    >>> top.compute()["laplacian_eigenvalue_1"].item()
    0.0

    Source: [LE] arXiv 2502.17598; the published k are 5 to 100.
    """

    _name = "laplacian_eigenvalue"
    _what = "eigenvalue of the attention Laplacian"

    def update(self, rows: Rows) -> None:
        if not (rows.causal and rows.self_attention):
            raise ValueError("the eigenvalues of the Laplacian stand on its diagonal in causal self-attention only.")
        if rows.sink is not None:
            raise ValueError("a sink key is no token and has no Laplacian eigenvalue: use rows='renormalize'.")
        self.use(Diagonal).update(rows)
        self.use(Columns).update(rows)

    def _values(self) -> Float[Tensor, "batch head key"]:
        columns = self.use(Columns)
        return eigenvalues_from_columns(columns.mass, self.use(Diagonal).weights, columns.count[:, None])


class TopSelfAttention(_TopValues):
    """The k largest weights that tokens give to themselves, the diagonal of the pattern, descending.

    Results: `self_attention_1` to `self_attention_<k>`, each in [0, 1]; NaN where a text has fewer tokens. O(n) memory
    a head. Under the policy "sink" weights count as they are, the sink taking its share.

    Args:
        k: how many.
        trace: keep those of the prefix at every step; stride: at every stride-th, held between.

    Raises:
        ValueError: k is no whole number of at least 1, or cross-attention.

    >>> import torch
    >>> from attnprobe import Rows, TopSelfAttention
    >>> top = TopSelfAttention(k=3)
    >>> top.update(Rows.from_pattern(torch.tensor([[1.0, 0.0], [0.5, 0.5]]).reshape(1, 1, 2, 2)))
    >>> {name: value.item() for name, value in top.compute().items()}
    {'self_attention_1': 1.0, 'self_attention_2': 0.5, 'self_attention_3': nan}

    Source: [LE] arXiv 2502.17598, the baseline of attention diagonals.
    """

    _name = "self_attention"
    _what = "weight of a token on itself"

    def update(self, rows: Rows) -> None:
        self.use(Diagonal).update(rows)
        self.accumulate(rows=rows.count)

    def _values(self) -> Float[Tensor, "batch head key"]:
        weights = self.use(Diagonal).weights
        key = torch.arange(weights.shape[-1], device=weights.device)
        return weights.where(key < self.total["rows"][:, None, None], torch.nan)
