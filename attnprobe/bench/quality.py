"""How good an answer is: a number for an example and the text the model gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnprobe.bench.example import Example

WITHOUT_A_MODEL = ("rouge_l", "token_f1", "exact_match", "contains")
WITH_ALIGNSCORE = ("alignscore", "alignscore_source")
QUALITIES = WITHOUT_A_MODEL + WITH_ALIGNSCORE

Quality = Callable[[Example, str], float]
# claims, contexts -> how far each context supports its claim, 0 to 1
Scorer = Callable[[Sequence[str], Sequence[str]], Sequence[float]]


def quality_function(name: str, *, alignscore: Scorer | None = None) -> Quality:
    """The quality of that name: a function of an example and the text of an answer."""
    raise NotImplementedError
