"""What a `UEManager` is given, where no attention is to be returned by the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lm_polygraph.defaults.register_default_stat_calculators import register_default_stat_calculators
from lm_polygraph.estimators import Estimator
from lm_polygraph.utils.builder_enviroment_stat_calculator import BuilderEnvironmentStatCalculator
from lm_polygraph.utils.dataset import Dataset
from lm_polygraph.utils.estimate_uncertainty import UncertaintyOutput
from lm_polygraph.utils.factory_stat_calculator import StatCalculatorContainer
from lm_polygraph.utils.manager import UEManager

from attnprobe.integrations.lm_polygraph.calculator import AttnProbeCalculator
from attnprobe.integrations.lm_polygraph.estimator import AttnProbeEstimator
from attnprobe.integrations.lm_polygraph.specification import Specification, single_pass_methods


def estimators(methods: Iterable[Specification]) -> list[AttnProbeEstimator]:
    """An estimator for each method, all of which share the pass of the calculator in `stat_calculators(methods)`.

    Raises:
        ValueError, TypeError: methods that make no sense, in one sentence.
    """
    return [AttnProbeEstimator(method, shared=True) for method in single_pass_methods(methods)]


def stat_calculators(methods: Iterable[Specification] = (), **settings: Any) -> list[StatCalculatorContainer]:
    """LM-Polygraph's own calculators, without returned attention and hidden states, and ours for the given methods.

    With these the model may be on sdpa. Estimators of LM-Polygraph that read attention (its RAUQ, AttentionScore, CSL,
    Focus) or hidden states do not run with them.

    Args:
        methods: as `estimators` was given; none where no estimator shares a pass.
        settings: of `lm_polygraph.defaults.register_default_stat_calculators`, for example `language` or `hf_cache`.

    Raises:
        ValueError, TypeError: methods that make no sense, in one sentence.
    """
    settings = {"output_attentions": False, "output_hidden_states": False, **settings}
    found: list[StatCalculatorContainer] = register_default_stat_calculators("Whitebox", **settings)
    chosen = list(methods)
    if chosen:
        stats, dependencies = AttnProbeCalculator.meta_info()
        found.append(
            StatCalculatorContainer(
                name=AttnProbeCalculator.__name__,
                stats=stats,
                dependencies=dependencies,
                builder="attnprobe.integrations.lm_polygraph",
                cfg={"methods": single_pass_methods(chosen)},
            )
        )
    return found


def estimate_uncertainty(model: Any, estimator: Estimator, input_text: str) -> UncertaintyOutput:
    """LM-Polygraph's `estimate_uncertainty` for a model on sdpa.

    Theirs asks every model for its attention, which a model on sdpa does not return. The result is the same, but that
    `generation_tokens` holds every token of the answer, the last one too.

    Raises:
        Exception: what the estimator raises.
    """
    shared = isinstance(estimator, AttnProbeEstimator) and estimator.shared
    manager = UEManager(
        Dataset([input_text], [""], batch_size=1),
        model,
        [estimator],
        available_stat_calculators=stat_calculators([estimator.method] if shared else ()),
        builder_env_stat_calc=BuilderEnvironmentStatCalculator(model),
        generation_metrics=[],
        ue_metrics=[],
        processors=[],
        ignore_exceptions=False,
        verbose=False,
        max_new_tokens=model.generation_parameters.max_new_tokens,
    )
    manager()
    return UncertaintyOutput(
        uncertainty=manager.estimations[estimator.level, str(estimator)][0],
        input_text=input_text,
        generation_text=manager.stats["greedy_texts"][0],
        generation_tokens=manager.stats["greedy_tokens"][0],
        model_path=model.model_path,
        estimator=str(estimator),
    )
