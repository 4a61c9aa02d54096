"""What tells one model from another, whatever library holds it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from attnprobe.hosts import Host

# Rows of the unembedding, spread over the vocabulary, that are looked at.
_ROWS = 64


@dataclass(frozen=True)
class Fingerprint:
    """The sizes of a model and a digest of some of its weights.

    Attributes:
        n_layers: number of layers.
        n_heads: query heads of a layer, None where layers differ.
        vocabulary: number of token ids.
        weights: digest of 64 rows of the unembedding in float32, None where the model shows none. The same model
            under TransformerLens and under transformers has the same one.
    """

    n_layers: int | None
    n_heads: int | None
    vocabulary: int | None
    weights: str | None

    @classmethod
    def of(cls, host: Host) -> Fingerprint:
        """The fingerprint of a model."""
        return cls(host.n_layers, host.n_heads, host.vocabulary, _digest(host))

    def check(self, other: Fingerprint) -> None:
        """Raise unless the other model may be the same.

        Raises:
            ValueError: it is not; the sentence says in what they differ.
        """
        names = {"n_layers": "layers", "n_heads": "heads a layer", "vocabulary": "token ids"}
        for name, what in names.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None and mine != theirs:
                raise ValueError(
                    f"the features are of a model with {mine} {what} and this one has {theirs}: use the same model."
                )
        if self.weights is not None and other.weights is not None and self.weights != other.weights:
            raise ValueError(
                "the features are of a model of the same size with other weights (of its unembedding): use the same "
                "model, in the same precision."
            )


def _digest(host: Host) -> str | None:
    try:
        unembedding = host.unembedding()
    except ValueError:  # none, or it is offloaded
        return None
    rows = torch.linspace(0, unembedding.shape[0] - 1, min(_ROWS, unembedding.shape[0]), dtype=torch.float64).long()
    some = unembedding.detach()[rows.to(unembedding.device)].float().cpu().contiguous()
    return hashlib.sha256(some.numpy().tobytes()).hexdigest()
