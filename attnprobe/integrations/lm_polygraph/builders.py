"""What LM-Polygraph calls when a configuration names this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnprobe.integrations.lm_polygraph.calculator import AttnProbeCalculator
from attnprobe.integrations.lm_polygraph.estimator import AttnProbeEstimator


def load_estimator(config: Any) -> AttnProbeEstimator:
    """The estimator of a configuration entry: `method`, perhaps `name` and `shared`, and options of the method.

    Raises:
        ValueError, TypeError: as `AttnProbeEstimator`.
    """
    return AttnProbeEstimator(**{str(key): value for key, value in _plain(config).items()})


def load_stat_calculator(config: Any, environment: Any) -> AttnProbeCalculator:
    """The calculator of a configuration entry: `methods`; the environment is not used.

    Raises:
        ValueError, TypeError: as `AttnProbeCalculator`.
    """
    return AttnProbeCalculator(**{str(key): value for key, value in _plain(config).items()})


def _plain(config: Any) -> Mapping[str, Any]:
    """A configuration without omegaconf's containers, which are neither lists nor mappings."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True)
    return config or {}
