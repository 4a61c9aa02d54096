"""RAUQ as LM-Polygraph computes it, on a model and prompt of ours.

This is `lm_polygraph.utils.estimate_uncertainty` taken apart at one place: what does not depend on the prompt (the
registry of statistics, the manager) is made once, before the clock runs, and several sequences may go in at once.
Generation, statistics and estimator are the library's own, with its defaults (attentions and hidden states returned).
It needs eager attention, keeps the attention of every layer and step until the generation is over, and its RAUQ
gives every sequence of a batch the attention of the first: with a batch only the time says something.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lm_polygraph.defaults.register_default_stat_calculators import register_default_stat_calculators
from lm_polygraph.estimators import RAUQ
from lm_polygraph.utils.builder_enviroment_stat_calculator import BuilderEnvironmentStatCalculator
from lm_polygraph.utils.dataset import Dataset
from lm_polygraph.utils.generation_parameters import GenerationParameters
from lm_polygraph.utils.manager import UEManager
from lm_polygraph.utils.model import WhiteboxModel
from torch import Tensor


class FixedPrompt:
    """A tokenizer that turns any text into the prompt at hand: texts need not survive tokenization there and back."""

    chat_template = None
    eos_token_id = None  # the library cuts answers there

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __call__(self, texts: list[str], **options: Any) -> dict[str, Tensor]:
        return {"input_ids": self.ids, "attention_mask": torch.ones_like(self.ids)}

    def decode(self, tokens: Any, **options: Any) -> str:
        return " ".join(map(str, torch.as_tensor(tokens).tolist()))


def rauq(model: Any, ids: Tensor, new_tokens: int) -> Callable[[], Tensor]:
    """A function that generates from the prompt [batch, token], scores, and returns the new tokens [batch, step]."""
    batch = ids.shape[0]
    parameters = GenerationParameters(max_new_tokens=new_tokens)
    whitebox = WhiteboxModel(model, FixedPrompt(ids), "benchmark", "CausalLM", parameters)
    manager = UEManager(
        Dataset([f"prompt {row}" for row in range(batch)], [""] * batch, batch_size=batch),
        whitebox,
        [RAUQ()],
        available_stat_calculators=register_default_stat_calculators("Whitebox"),
        builder_env_stat_calc=BuilderEnvironmentStatCalculator(whitebox),
        generation_metrics=[],
        ue_metrics=[],
        processors=[],
        ignore_exceptions=False,
        verbose=False,
        max_new_tokens=new_tokens,
    )

    def score() -> Tensor:
        before = len(manager.estimations["sequence", "RAUQ"])
        manager()
        assert len(manager.estimations["sequence", "RAUQ"]) == before + batch, "no score was computed"
        return torch.tensor(manager.stats["greedy_tokens"][-batch:])

    return score
