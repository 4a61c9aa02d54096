"""The mathematics of attnprobe as functions of torch tensors: no model, no state.

Patterns are [..., n_query, n_key] with rows that sum to 1; leading dimensions are kept. float64 in, float64
out; float32 in, float32 out; half precision is computed and returned in float32. Nothing is modified in
place. Every function that takes a pattern also takes `rows=` and `mask=`: see `check_pattern`.
"""

from attnprobe.functional.direction import HodgeSplit, asymmetry, hodge_from_columns, hodge_split
from attnprobe.functional.entropy import EntropyBound, entropy_bound, entropy_from_moments, spectral_entropy
from attnprobe.functional.gram import prefix_participation_ratio
from attnprobe.functional.laplacian import laplacian_eigenvalues, mean_laplacian_eigenvalue
from attnprobe.functional.log_determinant import attention_log_determinant
from attnprobe.functional.lookback import mean_look_back
from attnprobe.functional.measures import (
    leverage_scores,
    positional_measure,
    unembedding_measure,
    zipf_measure,
)
from attnprobe.functional.patterns import CheckedPattern, check_pattern
from attnprobe.functional.presoftmax import maximum_score
from attnprobe.functional.recurrence import recurrent_confidence, recurrent_log_confidence
from attnprobe.functional.repeats import duplicate_token_score, induction_score
from attnprobe.functional.routing import RoutingSplit, routing_split, split_from_moments
from attnprobe.functional.row_entropy import row_entropy
from attnprobe.functional.semantic import luq, semantic_classes, semantic_entropy
from attnprobe.functional.sinks import sink_score
from attnprobe.functional.sketch import SketchedRatio, sketched_participation_ratio
from attnprobe.functional.tdo import participation_ratio, tdo_matrix, tdo_spectrum
from attnprobe.functional.transport import (
    PrefixCapacity,
    SpectralCapacity,
    ThresholdCapacity,
    capacity_from_columns,
    landscape_from_columns,
    prefix_capacity,
    prefix_landscape,
    spectral_capacity,
    threshold_capacity,
)
from attnprobe.functional.values import ValueWeighted, value_weighted_attention

__all__ = [
    "CheckedPattern",
    "EntropyBound",
    "HodgeSplit",
    "PrefixCapacity",
    "RoutingSplit",
    "SketchedRatio",
    "SpectralCapacity",
    "ThresholdCapacity",
    "ValueWeighted",
    "asymmetry",
    "attention_log_determinant",
    "capacity_from_columns",
    "check_pattern",
    "duplicate_token_score",
    "entropy_bound",
    "entropy_from_moments",
    "hodge_from_columns",
    "hodge_split",
    "induction_score",
    "landscape_from_columns",
    "laplacian_eigenvalues",
    "leverage_scores",
    "luq",
    "maximum_score",
    "mean_laplacian_eigenvalue",
    "mean_look_back",
    "participation_ratio",
    "positional_measure",
    "prefix_capacity",
    "prefix_landscape",
    "prefix_participation_ratio",
    "recurrent_confidence",
    "recurrent_log_confidence",
    "routing_split",
    "row_entropy",
    "semantic_classes",
    "semantic_entropy",
    "sink_score",
    "sketched_participation_ratio",
    "spectral_capacity",
    "spectral_entropy",
    "split_from_moments",
    "tdo_matrix",
    "tdo_spectrum",
    "threshold_capacity",
    "unembedding_measure",
    "value_weighted_attention",
    "zipf_measure",
]
