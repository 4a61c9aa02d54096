"""Attention weighed by the norms of the values that it brings."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from attnprobe.analyzers.row_mean import RowMean, RowValues, traced
from attnprobe.analyzers.sinks import keys_name, keys_phrase
from attnprobe.functional.row_entropy import entropy_of_rows
from attnprobe.functional.sinks import FIRST_TOKEN, check_keys, mass_on
from attnprobe.functional.values import weigh_rows
from attnprobe.rows import Rows
from attnprobe.state import ValueNorms

_SOURCE = "norm-based analysis of attention (arXiv 2004.10102), of the values alone"


class ValueWeightedAttention(RowMean):
    """Sink score and row entropy of attention weighed by values, B_ij = A_ij ||v_j|| / sum_k A_ik ||v_k||.

    Results, means over rows: `value_weighted_sink_score` in [0, 1], the mass of B on the first token or on a chosen
    set of keys, and `value_weighted_row_entropy`, nats. A sink that takes much attention and has a small value moves
    little of the output, and has a small weighted score. O(n) memory a key/value head. Values are taken before the
    output projection; rows whose values are all 0 do not count. Under the policy "sink" the sink has no value and no
    share. The trace holds the values of each row.

    Args:
        keys: positions in the sequence, from 0 (padding is not counted); of other keys than the first the sink score
            is named after them, `value_weighted_sink_score_keys_0_5`.
        trace: keep the values of every row; stride: of every stride-th, held between.

    Needs the hook `hook_v`. Rows weigh values of earlier tokens, so an analyzer must see a sequence from its start;
    halves of one cannot be merged.

    Raises:
        ValueError: no keys, a negative one, one twice; rows without values, or results read where a key was attended
            to whose value was never seen.
        TypeError: keys that are no whole numbers.

    >>> import torch
    >>> from attnprobe import Rows, ValueWeightedAttention
    >>> analyzer = ValueWeightedAttention()
    >>> pattern, v = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[1.0], [3.0]])
    >>> analyzer.update(Rows.from_pattern(pattern.reshape(1, 1, 2, 2), v=v.reshape(1, 2, 1, 1)))
    >>> analyzer.compute()["value_weighted_sink_score"].item()
    0.625

    Source: norm-based analysis of attention, arXiv 2004.10102 (Kobayashi et al.), of the values alone.
    """

    needs = ("pattern", "v")

    def __init__(self, keys: Sequence[int] = FIRST_TOKEN, *, trace: bool = False, stride: int = 1) -> None:
        super().__init__(trace=trace, stride=stride)
        self.keys = check_keys(keys)

    @property
    def variables(self) -> dict[str, dict[str, str]]:  # type: ignore[override] # names depend on the settings here
        """Descriptions of the results."""
        share = f"share of {keys_phrase(self.keys)} in attention weighed by value norms"
        entropy = "mean entropy of attention rows weighed by value norms"
        return {
            "value_weighted_sink_score" + keys_name(self.keys): {"long_name": share, "units": "1", "source": _SOURCE},
            "value_weighted_row_entropy": {"long_name": entropy, "units": "nats", "source": _SOURCE},
        }

    def update(self, rows: Rows) -> None:
        norms = self.use(ValueNorms)
        norms.update(rows)
        if rows.v is not None and rows.key_position is not None:
            self.accumulate(known=_known(rows, rows.key_position))
        super().update(rows)
        known = self.total["known"][..., : rows.n_key]
        self.accumulate(unknown=rows.sums().mass.where(known == 0, 0.0).sum(-1))

    def compute(self) -> dict[str, Tensor]:
        if bool((self.total["unknown"] > 0).any()):
            raise ValueError(
                "rows attend to keys whose values were never seen: give one ValueWeightedAttention all rows of a "
                "sequence, from the first one on, with their values."
            )
        return super().compute()

    def measure(self, rows: Rows) -> dict[str, RowValues]:
        return self._weighed(rows, self.use(ValueNorms))

    def trace_rows(self, rows: Rows) -> dict[str, Tensor]:
        """The values of each row itself."""
        norms = ValueNorms()  # the new values come with the rows: a copy takes them in first
        norms.merge(self.use(ValueNorms))
        norms.update(rows)
        return traced(self._weighed(rows, norms))

    def _weighed(self, rows: Rows, norms: ValueNorms) -> dict[str, RowValues]:
        weighted, left = weigh_rows(rows.pattern, norms.by_head(rows.n_key).sqrt())
        share, entropy = self.variables
        counted = left & rows.valid.unsqueeze(1)
        return {
            share: RowValues(mass_on(weighted, self.keys), counted),
            entropy: RowValues(entropy_of_rows(weighted), counted),
        }


def _known(rows: Rows, key_position: Int[Tensor, "batch new_key"]) -> Int[Tensor, "batch one key"]:
    """1 at every key whose value these rows carry."""
    real = (key_position >= 0).long()
    known = real.new_zeros(real.shape[0], rows.n_key)
    return known.scatter_add_(-1, key_position.clamp_min(0), real).unsqueeze(1)
