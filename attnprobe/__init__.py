"""attnprobe: attention heads measured as operators while a language model reads and writes.

A `Probe` attaches to the attention patterns of a TransformerLens model and streams every new row to
analyzers that keep small running statistics; `SAUQ` and `score` turn them into an uncertainty.

>>> import attnprobe as ap
>>> ap.functional.__name__
'attnprobe.functional'

Names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# public name -> module that defines it (None: the submodule itself)
_EXPORTS: dict[str, str | None] = {
    "functional": None,
    "metrics": None,
    "integrations": None,
    "detection": None,
    "Rows": "attnprobe.rows",
    "Analyzer": "attnprobe.analyzers",
    "TDO": "attnprobe.analyzers",
    "IntrinsicTDO": "attnprobe.analyzers",
    "MeanRoutingSplit": "attnprobe.analyzers",
    "SpectralEntropyBound": "attnprobe.analyzers",
    "TransportCapacity": "attnprobe.analyzers",
    "Asymmetry": "attnprobe.analyzers",
    "LaplacianEigenvalues": "attnprobe.analyzers",
    "LogDeterminant": "attnprobe.analyzers",
    "SelfAttention": "attnprobe.analyzers",
    "PreviousTokenAttention": "attnprobe.analyzers",
    "SinkScore": "attnprobe.analyzers",
    "RowEntropy": "attnprobe.analyzers",
    "MeanLookBack": "attnprobe.analyzers",
    "InductionScore": "attnprobe.analyzers",
    "DuplicateTokenScore": "attnprobe.analyzers",
    "ValueWeightedAttention": "attnprobe.analyzers",
    "MaximumScore": "attnprobe.analyzers",
    "ScreenedTrace": "attnprobe.analyzers",
    "TDOSpectrum": "attnprobe.analyzers",
    "TopLaplacianEigenvalues": "attnprobe.analyzers",
    "TopSelfAttention": "attnprobe.analyzers",
    "Probe": "attnprobe.probe",
    "ablate": "attnprobe.interventions",
    "head_means": "attnprobe.interventions",
    "SAUQ": "attnprobe.uncertainty",
    "RAUQ": "attnprobe.uncertainty",
    "LapEigValRAUQ": "attnprobe.uncertainty",
    "LogDetRAUQ": "attnprobe.uncertainty",
    "Recurrent": "attnprobe.uncertainty",
    "ScreenedRecurrent": "attnprobe.uncertainty",
    "Perplexity": "attnprobe.uncertainty",
    "MaximumSequenceProbability": "attnprobe.uncertainty",
    "MeanTokenEntropy": "attnprobe.uncertainty",
    "MaximumTokenEntropy": "attnprobe.uncertainty",
    "AttentionScore": "attnprobe.uncertainty",
    "SemanticEntropy": "attnprobe.uncertainty",
    "LUQ": "attnprobe.uncertainty",
    "NLI": "attnprobe.uncertainty",
    "SampledMethod": "attnprobe.uncertainty",
    "Score": "attnprobe.uncertainty",
    "score": "attnprobe.uncertainty",
    "polarity": None,
    "polarity_study": "attnprobe.polarity",
    "atlas": None,
    "head_atlas": "attnprobe.atlas",
    "load_model": "attnprobe.models",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from attnprobe import atlas, detection, functional, integrations, metrics, polarity
    from attnprobe.analyzers import (
        TDO,
        Analyzer,
        Asymmetry,
        DuplicateTokenScore,
        InductionScore,
        IntrinsicTDO,
        LaplacianEigenvalues,
        LogDeterminant,
        MaximumScore,
        MeanLookBack,
        MeanRoutingSplit,
        PreviousTokenAttention,
        RowEntropy,
        ScreenedTrace,
        SelfAttention,
        SinkScore,
        SpectralEntropyBound,
        TDOSpectrum,
        TopLaplacianEigenvalues,
        TopSelfAttention,
        TransportCapacity,
        ValueWeightedAttention,
    )
    from attnprobe.atlas import head_atlas
    from attnprobe.interventions import ablate, head_means
    from attnprobe.models import load_model
    from attnprobe.polarity import polarity_study
    from attnprobe.probe import Probe
    from attnprobe.rows import Rows
    from attnprobe.uncertainty import (
        LUQ,
        NLI,
        RAUQ,
        SAUQ,
        AttentionScore,
        LapEigValRAUQ,
        LogDetRAUQ,
        MaximumSequenceProbability,
        MaximumTokenEntropy,
        MeanTokenEntropy,
        Perplexity,
        Recurrent,
        SampledMethod,
        Score,
        ScreenedRecurrent,
        SemanticEntropy,
        score,
    )


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'attnprobe' has no attribute {name!r}; it offers {', '.join(_EXPORTS)}")
    module = _EXPORTS[name]
    value = (
        importlib.import_module(f"attnprobe.{name}")
        if module is None
        else getattr(importlib.import_module(module), name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
