"""Attention to sinks: the first token, or any set of keys."""

from __future__ import annotations

from collections.abc import Sequence

from attnprobe.analyzers.row_mean import RowMean, RowValues
from attnprobe.functional.sinks import FIRST_TOKEN, check_keys, mass_on
from attnprobe.rows import Rows

_SOURCE = "Spectral Geometry of Attention (arXiv 2610.06012), sink score"


class SinkScore(RowMean):
    """Attention to the first token, or to a chosen set of keys: mean over rows, `sink_score` in [0, 1].

    Every row counts, the first one too, which in causal attention can only look at itself. Under the policy "sink"
    weights count as they are: a sink that is no token is no key of the set. The trace is the weight of each row.

    Args:
        keys: positions in the sequence, from 0 (padding is not counted); of other keys than the first the result is
            named after them, `sink_score_keys_0_5`. Keys that a sequence does not have receive nothing.
        trace: keep the weight of every row; stride: of every stride-th, held between.

    Raises:
        ValueError: no keys, a negative one, or one twice.
        TypeError: keys that are no whole numbers.

    >>> import torch
    >>> from attnprobe import Rows, SinkScore
    >>> analyzer = SinkScore()
    >>> analyzer.update(Rows.from_pattern(torch.tensor([[1.0, 0.0], [0.5, 0.5]]).reshape(1, 1, 2, 2)))
    >>> analyzer.compute()["sink_score"].item()
    0.75

    Source: [SG] arXiv 2610.06012; attention sinks, arXiv 2309.17453.
    """

    def __init__(self, keys: Sequence[int] = FIRST_TOKEN, *, trace: bool = False, stride: int = 1) -> None:
        super().__init__(trace=trace, stride=stride)
        self.keys = check_keys(keys)

    @property
    def variables(self) -> dict[str, dict[str, str]]:  # type: ignore[override] # names depend on the settings here
        """Descriptions of the results."""
        long_name = f"attention to {keys_phrase(self.keys)}"
        return {"sink_score" + keys_name(self.keys): {"long_name": long_name, "units": "1", "source": _SOURCE}}

    def measure(self, rows: Rows) -> dict[str, RowValues]:
        (name,) = self.variables
        return {name: RowValues(mass_on(rows.pattern, self.keys), rows.valid.unsqueeze(1))}

    def update(self, rows: Rows) -> None:
        fused = rows.fused_sums()
        if fused is None:
            super().update(rows)
        else:  # the pattern need not be formed for what its columns sum to
            (name,) = self.variables
            self._add(name, mass_on(fused.mass, self.keys), rows.count[:, None])


def keys_name(keys: tuple[int, ...]) -> str:
    """What is added to the name of a result about other keys than the first.

    >>> keys_name((0,)), keys_name((0, 5))
    ('', '_keys_0_5')
    """
    return "" if keys == FIRST_TOKEN else "_keys_" + "_".join(map(str, keys))


def keys_phrase(keys: tuple[int, ...]) -> str:
    """The keys in words.

    >>> keys_phrase((0,)), keys_phrase((0, 5))
    ('the first token', 'keys 0, 5')
    """
    return "the first token" if keys == FIRST_TOKEN else f"keys {', '.join(map(str, keys))}"
