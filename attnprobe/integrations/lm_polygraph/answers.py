"""What LM-Polygraph generated, read again: the prompts without padding, the answers without what runs on behind them.

One forward over prompt and answer, as `score(completions=...)` makes it, rather than a look into LM-Polygraph's own
generation: what its generation records belongs to padded slots, and to tokens that a batch decodes for sequences that
have ended; its probabilities are those left after tokens were forbidden; and it is not always there (several
estimators and calculators work from saved answers). The forward costs what reading the prompt does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_polygraph.utils.model import WhiteboxModel

from attnprobe.uncertainty.method import Method
from attnprobe.uncertainty.score import score

# What a batch must hold for its answers to be read.
NEEDED = ("input_texts", "greedy_tokens")


def score_answers(methods: Sequence[Method], stats: Mapping[str, Any], model: Any) -> dict[str, list[float]]:
    """Method name -> a number for each answer of a batch, all methods in one forward.

    Args:
        methods: scores of one answer.
        stats: LM-Polygraph's statistics of the batch, with those in `NEEDED`.
        model: its `WhiteboxModel` around a decoder.

    Raises:
        TypeError: another kind of model.
        ValueError: the tokenizer pads on the right, or what `score` raises.
    """
    _check_model(model)
    prompts = _prompts(model, list(stats["input_texts"]))
    ends, stopped = _stop_tokens(model), _stop_strings(model)
    answers = [answer_alone(list(tokens), ends, stopped) for tokens in stats["greedy_tokens"]]
    scores = score(model.model, prompts, completions=answers, methods=methods, batch_size=len(prompts))
    return {method.name: [one.uncertainty[method.name] for one in scores] for method in methods}


def answer_alone(tokens: list[int], ends: set[int], stopped: Callable[[list[int]], bool] | None) -> list[int]:
    """An answer up to the token that ended it.

    LM-Polygraph cuts at the tokenizer's end token alone. A sequence that another end token of the model or a stop
    string ended is followed by padding for as long as the rest of its batch goes on.

    >>> answer_alone([5, 7, 2, 0, 0], {2}, None)
    [5, 7, 2]
    """
    for n, token in enumerate(tokens, 1):
        if token in ends or (stopped is not None and stopped(tokens[:n])):
            return tokens[:n]
    return tokens


def _check_model(model: Any) -> None:
    kind = getattr(model, "model_type", None)
    if not isinstance(model, WhiteboxModel) or kind != "CausalLM":
        raise TypeError(
            "attention is read from a WhiteboxModel of model_type 'CausalLM' around a transformers decoder, not from "
            f"{type(model).__name__} of model_type {kind!r}."
        )


def _prompts(model: Any, texts: list[Any]) -> list[list[int]]:
    """The token ids of each prompt as the model was given them, chat template included, without padding."""
    encoded = model.tokenize(texts)
    ids, mask = encoded["input_ids"], encoded["attention_mask"].bool()
    if not mask[:, -1].all():
        raise ValueError(
            "the tokenizer pads on the right, where LM-Polygraph goes on from the padding: set "
            "tokenizer.padding_side = 'left'."
        )
    return [row[real].tolist() for row, real in zip(ids, mask, strict=True)]


def _stop_tokens(model: Any) -> set[int]:
    """Ids that end an answer: all that generation stops at, and the one that LM-Polygraph cuts at."""
    configured = getattr(model.model.generation_config, "eos_token_id", None)
    listed = [configured] if configured is None or isinstance(configured, int) else list(configured)
    return {int(token) for token in [*listed, model.tokenizer.eos_token_id] if token is not None}


def _stop_strings(model: Any) -> Callable[[list[int]], bool] | None:
    given = model.generation_parameters.stop_strings
    marks = [given] if isinstance(given, str) else list(given or [])
    if not marks:
        return None
    return lambda tokens: any(mark in model.tokenizer.decode(tokens) for mark in marks)
