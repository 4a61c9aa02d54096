"""Principal components and a logistic regression, as the one linear function that they are together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

#: Components at most.
COMPONENTS = 512
_MAX_ITER = 2000


@dataclass(frozen=True, eq=False)
class Linear:
    """log-odds(x) = (x - mean) . weights + intercept.

    Attributes:
        mean, weights: [feature] float64.
        intercept: log-odds of a text of mean features.
        components: how many principal components the weights were fitted on.
    """

    mean: Float[np.ndarray, "feature"]
    weights: Float[np.ndarray, "feature"]
    intercept: float
    components: int

    def log_odds(self, values: Float[np.ndarray, "text feature"]) -> Float[np.ndarray, "text"]:
        """Log-odds of label 1, nats."""
        # one row at a time: a sum over features must not depend on how many texts there are
        centred = values.astype(np.float64) - self.mean
        return np.array([float(np.dot(row, self.weights)) for row in centred]) + self.intercept


def fit_linear(
    values: Float[np.ndarray, "text feature"], labels: Float[np.ndarray, "text"], components: int = COMPONENTS
) -> Linear:
    """PCA and balanced logistic regression, both by scikit-learn.

    Args:
        values: features.
        labels: 0 and 1.
        components: at most so many, and never more than the number of features, or of texts less one.

    >>> fitted = fit_linear(np.array([[0.0, 1.0], [0.1, 1.0], [0.9, 1.0], [1.0, 1.0]]), np.array([0, 0, 1, 1]))
    >>> fitted.components, bool(fitted.log_odds(np.array([[1.0, 1.0]]))[0] > 0)
    (2, True)

    Source: [LE] arXiv 2502.17598, the supervised protocol.
    """
    x = values.astype(np.float64)
    number = max(1, min(components, len(x) - 1, x.shape[1]))
    pca = PCA(n_components=number, svd_solver="full").fit(x)
    regression = LogisticRegression(class_weight="balanced", max_iter=_MAX_ITER).fit(pca.transform(x), labels)
    return Linear(
        mean=pca.mean_,
        weights=pca.components_.T @ regression.coef_[0],
        intercept=float(regression.intercept_[0]),
        components=number,
    )
