"""Analyzers: what is measured on every watched head. One a file; to add one, see `attnprobe.analyzers.base`."""

from attnprobe.analyzers.asymmetry import Asymmetry
from attnprobe.analyzers.base import Analyzer
from attnprobe.analyzers.laplacian import LaplacianEigenvalues
from attnprobe.analyzers.log_determinant import LogDeterminant
from attnprobe.analyzers.lookback import MeanLookBack, PreviousTokenAttention, SelfAttention
from attnprobe.analyzers.presoftmax import MaximumScore
from attnprobe.analyzers.repeats import DuplicateTokenScore, InductionScore
from attnprobe.analyzers.routing import MeanRoutingSplit
from attnprobe.analyzers.row_entropy import RowEntropy
from attnprobe.analyzers.screened import ScreenedTDO, ScreenedTrace
from attnprobe.analyzers.sinks import SinkScore
from attnprobe.analyzers.spectral_entropy import SpectralEntropyBound
from attnprobe.analyzers.spectrum import TDOSpectrum
from attnprobe.analyzers.tdo import TDO, IntrinsicTDO
from attnprobe.analyzers.top_values import TopLaplacianEigenvalues, TopSelfAttention
from attnprobe.analyzers.transport import TransportCapacity
from attnprobe.analyzers.value_weighted import ValueWeightedAttention

__all__ = [
    "TDO",
    "Analyzer",
    "Asymmetry",
    "DuplicateTokenScore",
    "InductionScore",
    "IntrinsicTDO",
    "LaplacianEigenvalues",
    "LogDeterminant",
    "MaximumScore",
    "MeanLookBack",
    "MeanRoutingSplit",
    "PreviousTokenAttention",
    "RowEntropy",
    "ScreenedTDO",
    "ScreenedTrace",
    "SelfAttention",
    "SinkScore",
    "SpectralEntropyBound",
    "TDOSpectrum",
    "TopLaplacianEigenvalues",
    "TopSelfAttention",
    "TransportCapacity",
    "ValueWeightedAttention",
]
