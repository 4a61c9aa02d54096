"""What to do with rows of a host that do not sum to 1, without leaving the device."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnprobe.functional.patterns import ROW_POLICIES, row_tolerance
from attnprobe.functional.sums import PatternSums


def check_policy(policy: str) -> str:
    """The policy, if it is one.

    Raises:
        ValueError: it is not.
    """
    if policy not in ROW_POLICIES:
        raise ValueError(f"rows={policy!r} is not a row policy: choose one of {', '.join(ROW_POLICIES)}.")
    return policy


class RowAudit:
    """The worst row seen so far, kept on the device so that looking for it costs no synchronisation.

    `check` brings it to the host: at once on the CPU, when results are read on an accelerator.
    """

    def __init__(self, where: str, heads: tuple[int, ...] | None, policy: str) -> None:
        self._where = where
        self._heads = heads
        self._policy = policy
        self._worst: Float[Tensor, "batch head"] | None = None
        self._position: Int[Tensor, "batch head"] | None = None
        self._tolerance = 0.0

    def look(
        self, sums: PatternSums, position: Int[Tensor, "batch query"], dtype: torch.dtype
    ) -> Float[Tensor, "batch head query"]:
        """Take in rows before any policy; gives their sums (1 where the row is padding)."""
        self._tolerance = row_tolerance(dtype)
        total = torch.where((position >= 0)[:, None], sums.row, 1.0)
        excess = total - 1 if self._policy != "error" else (total - 1).abs()
        if self._policy == "renormalize":
            excess = torch.where(total > 0, excess, torch.inf)
        # a negative weight is as wrong as a row can be, whatever it sums to
        excess = torch.where((sums.least < 0) | excess.isnan(), torch.inf, excess)
        self._note(excess, position)
        return total

    def look_at_factors(
        self,
        q: Float[Tensor, "batch head query d"],
        k: Float[Tensor, "batch head query d"],
        z: Float[Tensor, "batch query head d"],
        position: Int[Tensor, "batch query"],
    ) -> None:
        """Take in what rows are made of: they are distributions by construction, but for what is no number."""
        # a key that is no number spoils its own row and all later ones: the first is named
        finite = q.sum(-1).isfinite() & z.sum(-1).isfinite().transpose(1, 2)
        finite &= k.sum(-1).isfinite()
        self._note(torch.where(finite | (position < 0)[:, None], 0.0, torch.inf), position)

    def _note(self, excess: Float[Tensor, "batch head query"], position: Int[Tensor, "batch query"]) -> None:
        worst, index = excess.max(-1)
        where = position.unsqueeze(1).expand_as(excess).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        if self._worst is None or self._position is None:
            self._worst, self._position = worst, where
        else:
            worse = worst > self._worst
            self._worst = torch.where(worse, worst, self._worst)
            self._position = torch.where(worse, where, self._position)
        if excess.device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Raise if any row so far was not a distribution.

        Raises:
            ValueError: names the site, head, sequence and row.
        """
        if self._worst is None or self._position is None or not bool((self._worst > self._tolerance).any()):
            return
        flat = int(self._worst.argmax())
        sequence, head = divmod(flat, self._worst.shape[1])
        shown = head if self._heads is None else self._heads[head]
        excess, row = float(self._worst[sequence, head]), int(self._position[sequence, head])
        if excess == float("inf"):
            what = "holds NaN, a negative weight or no mass at all"
            advice = "look at the host's precision (float16 overflows) and at hooks that edit the pattern"
        else:
            what = f"does not sum to 1 (off by {excess:.3g})"
            advice = (
                "rows='renormalize' or rows='sink' admit models whose softmax has a sink, and eval mode rules out "
                "dropout"
            )
        raise ValueError(
            f"at {self._where}, head {shown}, sequence {sequence}, the row of position {row} {what}, so it is not a "
            f"distribution: {advice}."
        )
