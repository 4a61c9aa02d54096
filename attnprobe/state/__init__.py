"""Streaming sufficient statistics of one attention site, shared by the analyzers that need them."""

from attnprobe.state.columns import Columns
from attnprobe.state.diagonal import Diagonal
from attnprobe.state.gram import Gram
from attnprobe.state.off_diagonal import OffDiagonal
from attnprobe.state.outputs import OutputMoments
from attnprobe.state.prefix_mass import PrefixMass
from attnprobe.state.queries import Queries
from attnprobe.state.reciprocity import Reciprocity
from attnprobe.state.sketch import Sketch
from attnprobe.state.statistic import Statistic, StatisticPool
from attnprobe.state.tokens import Tokens
from attnprobe.state.values import ValueNorms

__all__ = [
    "Columns",
    "Diagonal",
    "Gram",
    "OffDiagonal",
    "OutputMoments",
    "PrefixMass",
    "Queries",
    "Reciprocity",
    "Sketch",
    "Statistic",
    "StatisticPool",
    "Tokens",
    "ValueNorms",
]
