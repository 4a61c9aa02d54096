"""Analyzers: what is measured on every watched head. One a file; to add one, see `attnprobe.analyzers.base`."""

from attnprobe.analyzers.asymmetry import Asymmetry
from attnprobe.analyzers.base import Analyzer
from attnprobe.analyzers.laplacian import LaplacianEigenvalues
from attnprobe.analyzers.log_determinant import LogDeterminant
from attnprobe.analyzers.lookback import PreviousTokenAttention, SelfAttention
from attnprobe.analyzers.routing import MeanRoutingSplit
from attnprobe.analyzers.screened import ScreenedTDO, ScreenedTrace
from attnprobe.analyzers.spectral_entropy import SpectralEntropyBound
from attnprobe.analyzers.tdo import TDO, IntrinsicTDO
from attnprobe.analyzers.transport import TransportCapacity

__all__ = [
    "TDO",
    "Analyzer",
    "Asymmetry",
    "IntrinsicTDO",
    "LaplacianEigenvalues",
    "LogDeterminant",
    "MeanRoutingSplit",
    "PreviousTokenAttention",
    "ScreenedTDO",
    "ScreenedTrace",
    "SelfAttention",
    "SpectralEntropyBound",
    "TransportCapacity",
]
