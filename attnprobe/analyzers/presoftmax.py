"""Scores before the softmax: an analyzer of something else than the pattern."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from attnprobe.analyzers.row_mean import RowMean, RowValues
from attnprobe.functional.presoftmax import disagrees, maximum_of_rows
from attnprobe.rows import Rows


class MaximumScore(RowMean):
    """Largest pre-softmax score of a row: mean over rows, `maximum_score`, in units of the scores.

    Scores are those that enter the softmax: scaled, with any softcap. Softmax forgets what is added to a row, so the
    pattern says nothing of their size. The trace is the largest score of each row.

    Needs the hook `hook_attn_scores`, and true scores there. Where a model computes attention inside transformers
    (BERT, OPT, GPT-J and others under a TransformerBridge) that hook shows the pattern itself, which is refused: on
    the first forward, or when results are read. A plain transformers model has no such hook, and is refused too.

    Args:
        trace: keep the largest score of every row; stride: of every stride-th, held between.

    Raises:
        ValueError: rows without scores, or results read where a pattern was not the softmax of its scores.

    >>> import torch
    >>> from attnprobe import MaximumScore, Rows
    >>> analyzer = MaximumScore()
    >>> scores = torch.tensor([[3.0, -torch.inf], [1.0, 2.0]]).reshape(1, 1, 2, 2)
    >>> analyzer.update(Rows.from_pattern(scores.softmax(-1), scores=scores))
    >>> analyzer.compute()["maximum_score"].item()
    2.5

    Source: growth of attention logits, arXiv 2302.05442 (Dehghani et al.).
    """

    needs = ("pattern", "scores")
    variables: ClassVar = {
        "maximum_score": {"long_name": "largest pre-softmax score of a row", "units": "units of the scores"}
    }

    def measure(self, rows: Rows) -> dict[str, RowValues]:
        # what stands for keys that a row may not see differs from host to host, their weight does not: 0
        return {"maximum_score": RowValues(maximum_of_rows(_scores(rows), rows.pattern), rows.valid.unsqueeze(1))}

    def update(self, rows: Rows) -> None:
        super().update(rows)
        last = disagrees(_scores(rows)[..., -1:, :], rows.pattern[..., -1:, :])
        self.accumulate(disagreeing=last.sum(-1))

    def compute(self) -> dict[str, Tensor]:
        if bool((self.total["disagreeing"] > 0).any()):
            raise ValueError(
                "the pattern is not the softmax of what hook_attn_scores shows, so these are no pre-softmax scores: "
                "this architecture computes attention inside transformers. Drop MaximumScore, or name other layers."
            )
        return super().compute()


def _scores(rows: Rows) -> Tensor:
    if rows.scores is None:
        raise ValueError("MaximumScore needs pre-softmax scores and these rows carry none: pass scores.")
    return rows.scores
