"""Log-probability and entropy of the tokens, step by step, from the logits of an attached model."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnprobe.sequences import Plan, Sequences

_ROWS_AT_ONCE = 32  # [batch, rows, vocab] in float32 is held for this many rows


class TokenTrace:
    """What the model thought of each token of one batch of sequences, when it was chosen.

    The row of a step gives the distribution; the token itself is known when it is fed back. The last token never
    is: `resolve` says which it was.
    """

    def __init__(self) -> None:
        self._position: list[Int[Tensor, "batch row"]] = []
        self._log_probability: list[Float[Tensor, "batch row"]] = []
        self._entropy: list[Float[Tensor, "batch row"]] = []
        self._broken: Tensor | bool = False
        self._open = 0  # rows from here on may wait for their token
        self._pending: Float[Tensor, "batch vocab"] | None = None
        self._pending_position: Int[Tensor, "batch"] | None = None

    def update(self, logits: Float[Tensor, "batch row vocab"], plan: Plan, sequences: Sequences) -> None:
        """Take the logits of one forward; a host may give those of its last rows only."""
        by_position = sequences.tokens_by_position(sequences.seen, logits.device)
        if by_position is None:
            raise ValueError("token probabilities need token ids, and the model was given embeddings.")
        self._resolve_pending(plan, sequences)
        self._open = len(self._position)
        if plan.trace_from is None:
            return
        first = max(plan.trace_from, plan.new - logits.shape[1])
        for low in range(first, plan.new, _ROWS_AT_ONCE):
            high = min(low + _ROWS_AT_ONCE, plan.new)
            rows = logits[:, logits.shape[1] - plan.new + low : logits.shape[1] - plan.new + high]
            self._take(rows, sequences.positions(plan.start, plan.new, logits.device)[:, low:high], by_position)

    def resolve(self, tokens: Int[Tensor, "batch"]) -> None:
        """Say which token each sequence chose last."""
        if self._pending is None or self._pending_position is None:
            return
        self._fill(self._pending_position, self._pending.gather(1, tokens.to(self._pending.device)[:, None]))

    def rows(self) -> tuple[Int[Tensor, "batch row"], Tensor, Tensor]:
        """Position of each row, log-probability of the token it chose (NaN: not known), entropy in nats."""
        if not self._position:
            raise ValueError("no next-token logits have been seen yet: run the model under the probe first.")
        if bool(self._broken):
            raise ValueError("the model's logits hold NaN: look at its precision and at hooks that edit activations.")
        parts = (self._position, self._log_probability, self._entropy)
        position, log_probability, entropy = (torch.cat(part, 1) for part in parts)
        return position, log_probability, entropy

    def _take(self, logits: Tensor, position: Tensor, by_position: Tensor) -> None:
        log_probability = torch.log_softmax(logits.float(), -1)
        # 0 log 0 = 0, without the slow special function
        finite = log_probability.clamp_min(torch.finfo(log_probability.dtype).min)
        entropy = -(log_probability.exp() * finite).sum(-1)
        next_position = position + 1
        known = next_position < by_position.shape[1]
        token = by_position.gather(1, next_position.clamp(max=by_position.shape[1] - 1))
        token = torch.where(known & (position >= 0), token, -1)
        chosen = log_probability.gather(-1, token.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        self._position.append(position)
        self._log_probability.append(torch.where(token >= 0, chosen, torch.nan))
        self._entropy.append(torch.where(position >= 0, entropy, torch.nan))
        self._broken = self._broken | (entropy.isnan() & (position >= 0)).any()
        # the last real row of each sequence waits for its token
        last = position.argmax(1)
        pending = log_probability.gather(1, last[:, None, None].expand(-1, 1, logits.shape[-1])).squeeze(1)
        pending_position = position.gather(1, last[:, None]).squeeze(1)
        if self._pending is None or self._pending_position is None:
            self._pending, self._pending_position = pending, pending_position
        else:  # a finished sequence has no row here and keeps its last one
            newer = pending_position >= 0
            self._pending = torch.where(newer[:, None], pending, self._pending)
            self._pending_position = torch.where(newer, pending_position, self._pending_position)

    def _resolve_pending(self, plan: Plan, sequences: Sequences) -> None:
        """The first new slot holds the token that the pending rows chose, even where its own row does not count."""
        if self._pending is not None and self._pending_position is not None and sequences.tokens is not None:
            token = sequences.tokens[:, plan.start, None].to(self._pending.device)
            self._fill(self._pending_position, self._pending.gather(1, token))

    def _fill(self, position: Tensor, log_probability: Tensor) -> None:
        for i in range(self._open, len(self._position)):
            hit = (self._position[i] == position[:, None]) & self._log_probability[i].isnan()
            self._log_probability[i] = torch.where(hit, log_probability, self._log_probability[i])
