"""Scores of several answers to one prompt: semantic classes, semantic entropy, and what answers contradict."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ESTIMATES = ("mean", "direct")
CLASS_PROBABILITIES = ("sum", "frequency")


def semantic_classes(entails: Bool[Tensor, "*batch sample sample"]) -> Int[Tensor, "*batch sample"]:
    """Classes of answers that entail one another.

    Answers are taken in order. Each joins the first class whose first member it entails and is entailed by, and
    founds a class of its own where there is none. Other members are not compared with, so the order matters where
    entailment is not transitive.

    Args:
        entails: [..., N, N] whether answer i (premise) entails answer j (hypothesis). The diagonal is not read.

    Returns:
        [..., N] class of each answer, numbered from 0 in the order of their first members.

    Raises:
        TypeError: not a boolean tensor.
        ValueError: not square, or no answer.

    >>> import torch
    >>> from attnprobe.functional import semantic_classes
    >>> entails = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 1]]).bool()
    >>> semantic_classes(entails).tolist()  # 1 entails 0, and 0 does not entail 1
    [0, 1, 0]

    Source: Kuhn et al. 2023 (2302.09664), bidirectional entailment clustering.
    """
    if not isinstance(entails, Tensor) or entails.dtype != torch.bool:
        kind = entails.dtype if isinstance(entails, Tensor) else type(entails).__name__
        raise TypeError(f"entails must be a boolean tensor [..., sample, sample], not {kind}.")
    _check_square(entails, "entails")
    mutual = entails & entails.mT
    founders: list[Tensor] = []  # [...] whether answer i is the first of a class
    owners: list[Tensor] = []  # [...] the first member of the class of answer i
    for i in range(entails.shape[-1]):
        itself = torch.full(entails.shape[:-2], i, device=entails.device)
        if i == 0:
            founders.append(torch.ones_like(itself, dtype=torch.bool))
            owners.append(itself)
            continue
        joins = torch.stack(founders, -1) & mutual[..., :i, i]
        founders.append(~joins.any(-1))
        owners.append(torch.where(founders[-1], itself, joins.int().argmax(-1)))
    numbers = torch.stack(founders, -1).cumsum(-1) - 1
    return numbers.gather(-1, torch.stack(owners, -1))


def semantic_entropy(
    log_probability: Float[Tensor, "*batch sample"],
    classes: Int[Tensor, "*batch sample"],
    *,
    estimate: str = "mean",
    class_probability: str = "sum",
    counted: Bool[Tensor, "*batch sample"] | None = None,
) -> Float[Tensor, "*batch"]:
    """How spread over meanings sampled answers are, nats.

        log P(C) = log sum_{i in C} p_i,      score = -(1/N) sum_i log P(class of i)

    p_i is the probability of a whole answer, so P(C) is what of a class has been seen, not the class's whole
    probability: the score grows with the length of answers as well as with the number of meanings.

    Args:
        log_probability: [..., N] log p_i of each answer, nats; not read for class_probability="frequency".
        classes: [..., N] class of each answer, as `semantic_classes` gives.
        estimate: "mean" over answers of -log P, or "direct": the sum over answers of -P log P. The direct form has a
            term an answer, so that a class of k answers counts k times.
        class_probability: "sum" of the members' probabilities, or "frequency": the share of the answers.
        counted: [..., N] answers that count into the probability of their class, all by default. Leaving repetitions
            out gives every distinct answer its probability once.

    Returns:
        [...] in float32 or float64. One answer alone has -log p_1.

    Raises:
        TypeError: not floating-point log-probabilities, or not whole-numbered classes.
        ValueError: an unknown option, shapes that differ, no answer, a log-probability that is NaN or +inf, a class
            without a counted answer.

    >>> import torch
    >>> from attnprobe.functional import semantic_entropy
    >>> log_p = torch.tensor([0.5, 0.25, 0.125]).log()
    >>> round(semantic_entropy(log_p, torch.tensor([0, 0, 1])).item(), 4)  # -(2 log 0.75 + log 0.125) / 3
    0.8849
    >>> round(semantic_entropy(log_p, torch.tensor([0, 0, 1]), class_probability="frequency").item(), 4)
    0.6365

    Source: Kuhn et al. 2023 (2302.09664), equations 2 to 4; "direct" as LM-Polygraph has it, after
    Aichberger et al. 2024 (2406.04306).
    """
    _check_choice("estimate", estimate, ESTIMATES)
    _check_choice("class_probability", class_probability, CLASS_PROBABILITIES)
    _check_answers(log_probability, classes, counted)
    dtype = torch.promote_types(log_probability.dtype, torch.float32)
    same = classes[..., :, None] == classes[..., None, :]
    if class_probability == "frequency":
        own = same.to(dtype).mean(-1).log()
    else:
        if (log_probability.isnan() | log_probability.isposinf()).any():
            raise ValueError("log_probability must be finite or -inf for every answer, without NaN.")
        if counted is not None:
            same = same & counted[..., None, :]
        if not same.any(-1).all():
            raise ValueError("counted leaves out every answer of some class: keep at least one of each.")
        of_others = log_probability.to(dtype)[..., None, :].masked_fill(~same, -torch.inf)
        own = of_others.logsumexp(-1)
    if estimate == "direct":
        return -torch.where(own.isneginf(), 0.0, own.exp() * own).sum(-1)  # 0 log 0 is 0
    return -own.mean(-1)


def luq(
    entailment: Float[Tensor, "*batch sample sample"], contradiction: Float[Tensor, "*batch sample sample"]
) -> Float[Tensor, "*batch"]:
    """How little sampled answers support one another, in [0, 1].

        sim(i, j) = e^E / (e^E + e^C),      score = 1 - mean over i of the mean over j != i of sim(i, j)

    E and C are the logits of "answer i entails answer j" and "contradicts" (premise i, hypothesis j). As all
    ordered pairs count alike, the transposed logits give the same score.

    Args:
        entailment, contradiction: [..., N, N] logits. The diagonal is not read.

    Returns:
        [...] in float32 or float64: 0 where every answer entails every other, 1 where all contradict.

    Raises:
        TypeError: not floating-point tensors.
        ValueError: not square or of different shapes, fewer than two answers, or NaN off the diagonal.

    >>> import torch
    >>> from attnprobe.functional import luq
    >>> entailment = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    >>> round(luq(entailment, torch.zeros(2, 2)).item(), 4)  # 1 - (sigmoid(2) + sigmoid(0)) / 2
    0.3096

    Source: Zhang et al. 2024 (2403.20279), with whole answers in place of their sentences.
    """
    for name, logits in (("entailment", entailment), ("contradiction", contradiction)):
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"{name} must be a floating-point tensor [..., sample, sample], not {kind}.")
        _check_square(logits, name)
    if entailment.shape != contradiction.shape:
        raise ValueError(
            f"entailment {tuple(entailment.shape)} and contradiction {tuple(contradiction.shape)} must have one shape."
        )
    n = entailment.shape[-1]
    if n < 2:
        raise ValueError("LUQ compares answers with one another: it needs at least two.")
    dtype = torch.promote_types(entailment.dtype, torch.promote_types(contradiction.dtype, torch.float32))
    # the quotient as a sigmoid, which cannot overflow
    similarity = (entailment.to(dtype) - contradiction.to(dtype)).sigmoid()
    pairs = ~torch.eye(n, dtype=torch.bool, device=similarity.device)
    if similarity[..., pairs].isnan().any():
        raise ValueError("entailment and contradiction must be numbers for every pair, without NaN.")
    return 1 - similarity[..., pairs].mean(-1)


def _check_square(matrix: Tensor, what: str) -> None:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"{what} must be square in its last two axes, but its shape is {tuple(matrix.shape)}.")
    if matrix.shape[-1] == 0:
        raise ValueError(f"{what} is empty: there must be at least one answer.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: use {' or '.join(map(repr, choices))}.")


def _check_answers(log_probability: Tensor, classes: Tensor, counted: Tensor | None) -> None:
    if not isinstance(log_probability, Tensor) or not log_probability.is_floating_point():
        kind = log_probability.dtype if isinstance(log_probability, Tensor) else type(log_probability).__name__
        raise TypeError(f"log_probability must be a floating-point tensor [..., sample], not {kind}.")
    if not isinstance(classes, Tensor) or classes.is_floating_point() or classes.dtype == torch.bool:
        kind = classes.dtype if isinstance(classes, Tensor) else type(classes).__name__
        raise TypeError(f"classes must be a tensor of whole numbers [..., sample], not {kind}.")
    if counted is not None and (not isinstance(counted, Tensor) or counted.dtype != torch.bool):
        raise TypeError("counted must be a boolean tensor [..., sample].")
    shapes = {tuple(given.shape) for given in (log_probability, classes, counted) if given is not None}
    if len(shapes) > 1:
        raise ValueError(
            f"log_probability {tuple(log_probability.shape)} and classes {tuple(classes.shape)}"
            + ("" if counted is None else f" and counted {tuple(counted.shape)}")
            + " must have one shape."
        )
    if log_probability.ndim == 0 or log_probability.shape[-1] == 0:
        raise ValueError("log_probability is empty: there must be at least one answer.")
