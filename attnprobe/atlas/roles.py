"""Names for heads by what they mostly do: stated thresholds on a few diagnostics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float, Int
from scipy.special import gammaln

ROLES = ("copying", "shifting", "sinking", "sink-biased", "diffuse", "mixed")
#: the diagnostics that roles are told by
NEEDED = ("self_attention", "previous_token_attention", "sink_score", "participation_ratio", "row_entropy")


@dataclass(frozen=True)
class RoleThresholds:
    """Where roles begin. The first that fits is the head's; one that none fits is mixed.

    | role | |
    |---|---|
    | copying | attention to the token itself >= `copying` |
    | shifting | attention to the token before >= `shifting` |
    | sinking | attention to the first token >= `sink`, participation ratio < `routing`: it routes little |
    | sink-biased | attention to the first token >= `sink`, participation ratio >= `routing`: it routes too |
    | diffuse | row entropy >= `diffuse` times that of uniform causal attention |

    Attributes:
        copying, shifting, sink: shares of attention in [0, 1].
        routing: a participation ratio in [0, 1].
        diffuse: a share of the largest possible entropy in [0, 1].

    Raises:
        ValueError: a threshold outside [0, 1].

    Source: the maps of [SG] arXiv 2610.06012 (copy, shift, sink, sink-biased); the thresholds are our reading.
    """

    copying: float = 0.5
    shifting: float = 0.5
    sink: float = 0.5
    routing: float = 0.1
    diffuse: float = 0.5

    def __post_init__(self) -> None:
        for one in fields(self):
            if not 0 <= getattr(self, one.name) <= 1:
                raise ValueError(f"the threshold {one.name}={getattr(self, one.name)} is no share: use 0 to 1.")


@dataclass(frozen=True, eq=False)
class Roles:
    """The roles of heads, and for each role the head that shows it best.

    Attributes:
        role: [layer, head] one of `ROLES`.
        representative: role -> (layer index, head) of the head with the largest value of what the role is told by.
    """

    role: np.ndarray
    representative: dict[str, tuple[int, int]]


def roles_of(
    means: Mapping[str, Float[np.ndarray, "layer head"]],
    tokens: Int[np.ndarray, "text"],
    thresholds: RoleThresholds,
) -> Roles:
    """The role of every head.

    Args:
        means: diagnostic -> mean over texts; those of `NEEDED` are read.
        tokens: of each text.
        thresholds: where roles begin.

    Raises:
        KeyError: a diagnostic is missing.
    """
    own, before, sink, ratio, entropy = (means[name] for name in NEEDED)
    spread = entropy / uniform_entropy(tokens)
    sinks = sink >= thresholds.sink
    fits = {
        "copying": own >= thresholds.copying,
        "shifting": before >= thresholds.shifting,
        "sinking": sinks & (ratio < thresholds.routing),
        "sink-biased": sinks & (ratio >= thresholds.routing),
        "diffuse": spread >= thresholds.diffuse,
    }
    role = np.select(list(fits.values()), list(fits), default="mixed")
    shown_by = {"copying": own, "shifting": before, "sinking": sink, "sink-biased": ratio, "diffuse": spread}
    representative = {}
    for name, value in shown_by.items():
        if (role == name).any():
            best = np.where(role == name, value, -np.inf).argmax()
            layer, head = np.unravel_index(best, role.shape)
            representative[name] = (int(layer), int(head))
    return Roles(role, representative)


def uniform_entropy(tokens: Int[np.ndarray, "text"]) -> float:
    """Mean row entropy of uniform causal attention, nats: the largest there is. Mean over texts of (log n!) / n.

    >>> import numpy as np
    >>> round(uniform_entropy(np.array([2])), 4)
    0.3466
    """
    n = np.asarray(tokens, dtype=np.float64)
    return float((gammaln(n + 1) / n).mean())
