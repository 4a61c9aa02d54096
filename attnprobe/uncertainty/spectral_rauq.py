"""LapEigValRAUQ and LogDetRAUQ: the recurrence with summaries of the diagonal as routing signals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnprobe.analyzers import Analyzer, LaplacianEigenvalues, LogDeterminant
from attnprobe.uncertainty.evidence import Evidence
from attnprobe.uncertainty.screened import ScreenedRecurrent


class LapEigValRAUQ(ScreenedRecurrent):
    """The recurrence of `SAUQ` at its heads, with the mean Laplacian eigenvalue of the prefix as signal.

        s_t = (1/S) sum_i min(max(L_ii, 0), 1),    L_ii = (sum_{u >= i} a_ui) / (S - i) - a_ii    (i = 0..S-1)

    a is the pattern of the prefix that chose token t, S its length. s_t is small: a token must receive from later ones,
    on average, more than it gives itself to add to it at all.

    Args:
        alpha: weight of the token's probability, 0.2.
        layers: "middle" (default), "all" or layer numbers.
        clip: "each" (default): every eigenvalue is clipped to [0, 1]; "mean": their mean is (our reading: the source
            does not say).
        screen: how the head is chosen, as in `SAUQ`.

    Raises:
        ValueError: an unknown option; rows under the policy "sink", when it runs.

    >>> import attnprobe as ap
    >>> ap.LapEigValRAUQ().name, ap.LapEigValRAUQ(clip="mean").name
    ('LapEigValRAUQ', 'LapEigValRAUQ-clip-mean')

    Source: [SG] arXiv 2610.06012, LapEigValRAUQ; the eigenvalues are those of LapEigvals (arXiv 2502.17598).
    """

    def __init__(
        self,
        alpha: float = 0.2,
        layers: str | Sequence[int] = "middle",
        *,
        clip: str = "each",
        screen: str = "final",
    ) -> None:
        super().__init__(alpha=alpha, layers=layers, screen=screen)
        laplacian = LaplacianEigenvalues(clip)
        self._laplacian = self.at_chosen_heads(laplacian)
        self.signal = self._laplacian.screened_name(laplacian.result_name)
        self.clip = clip
        self.name = (
            "LapEigValRAUQ" + ("" if clip == "each" else "-clip-mean") + ("" if screen == "final" else "-screen-mean")
        )

    def analyzers(self) -> list[Analyzer]:
        return [*super().analyzers(), self._laplacian]


class LogDetRAUQ(ScreenedRecurrent):
    """The recurrence of `SAUQ` at its heads, with the geometric mean of the self-attention weights as signal.

        s_t = exp((1/S) sum_i log a_ii) = (det A^(t))^(1/S)

    A^(t) is the pattern of the prefix that chose token t, S its length. A single weight of 0 makes s_t 0 from there on.

    Args:
        alpha: weight of the token's probability, 0.2.
        layers: "middle" (default), "all" or layer numbers.
        epsilon: added to every weight, 0 (our reading: the source does not say). A small one, such as 1e-12, keeps
            weights that underflow in float16 from deciding everything; s_t is capped at 1.
        screen: how the head is chosen, as in `SAUQ`.

    Raises:
        ValueError: an unknown option.

    >>> import attnprobe as ap
    >>> ap.LogDetRAUQ().name, ap.LogDetRAUQ(epsilon=1e-12).name
    ('LogDetRAUQ', 'LogDetRAUQ-epsilon1e-12')

    Source: [SG] arXiv 2610.06012, LogDetRAUQ; the determinant as in LapEigvals (arXiv 2502.17598).
    """

    def __init__(
        self,
        alpha: float = 0.2,
        layers: str | Sequence[int] = "middle",
        *,
        epsilon: float = 0.0,
        screen: str = "final",
    ) -> None:
        super().__init__(alpha=alpha, layers=layers, screen=screen)
        log_determinant = LogDeterminant(epsilon)
        self._log_determinant = self.at_chosen_heads(log_determinant)
        self.signal = self._log_determinant.screened_name(log_determinant.mean_name)
        self.epsilon = epsilon
        self.name = (
            "LogDetRAUQ" + (f"-epsilon{epsilon:g}" if epsilon else "") + ("" if screen == "final" else "-screen-mean")
        )

    def analyzers(self) -> list[Analyzer]:
        return [*super().analyzers(), self._log_determinant]

    def signals(self, evidence: Evidence, layers: tuple[int, ...]) -> np.ndarray:
        return np.exp(np.minimum(super().signals(evidence, layers), 0.0))
