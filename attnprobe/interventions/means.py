"""What each head says on average, over all tokens of some texts: what mean ablation puts in a head's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnprobe.hosts import HeadOutputs, Host, host_of
from attnprobe.probe_settings import DEFAULT_PATTERN


def head_means(model: Any, texts: str | Sequence[Any], *, tokenizer: Any = None) -> Float[Tensor, "layer head d"]:
    """The mean output z of every head over all tokens of the texts, each token weighing the same.

    Args:
        model: TransformerBridge, HookedTransformer or transformers model: a decoder.
        texts: a string, a list of strings, or a list of token-id lists; each is read by itself.
        tokenizer: used instead of `model.tokenizer`.

    Returns:
        [layer, head, d] in float32 on the CPU; NaN for layers without attention.

    Raises:
        TypeError, ValueError: texts that cannot be read, or layers whose heads differ in number or size.

    >>> import attnprobe as ap
    >>> model = ap.load_model()  # doctest: +SKIP
    >>> ap.head_means(model, ["Rain falls.", "The sun is up."]).shape  # doctest: +SKIP
    torch.Size([30, 9, 64])
    """
    host = host_of(model)
    sequences = _token_ids(texts, tokenizer if tokenizer is not None else getattr(model, "tokenizer", None))
    sites = host.sites(DEFAULT_PATTERN)
    sums: dict[int, Tensor] = {}

    def add(outputs: HeadOutputs) -> Tensor:
        total = outputs.z.detach().double().sum((0, 1)).cpu()
        before = sums.get(outputs.site.layer)
        sums[outputs.site.layer] = total if before is None else before + total
        return outputs.z

    with torch.no_grad(), host.replace_outputs(sites, add):
        for ids in sequences:
            _read(host, ids)
    shapes = {tuple(total.shape) for total in sums.values()}
    if len(shapes) > 1:
        raise ValueError(
            f"the heads of this model differ from layer to layer ({', '.join(map(str, sorted(shapes)))}), so that "
            "their means are no one tensor: use mode='zero' or 'sink'."
        )
    n_layers = max(host.n_layers or 0, max(sums) + 1)
    means = torch.full((n_layers, *shapes.pop()), float("nan"))
    n_tokens = sum(map(len, sequences))
    for layer, total in sums.items():
        means[layer] = (total / n_tokens).float()
    return means


def _read(host: Host, ids: list[int]) -> None:
    device = next((p.device for p in host.model.parameters() if not p.is_meta), torch.device("cpu"))
    tokens = torch.tensor([ids], device=device)
    host.decode(tokens, torch.ones_like(tokens), None, 1)


def _token_ids(texts: Any, tokenizer: Any) -> list[list[int]]:
    if hasattr(texts, "tolist"):
        texts = texts.tolist()
    listed = [texts] if isinstance(texts, str) else texts
    if not isinstance(listed, list | tuple) or not listed:
        raise ValueError("the reference is empty or no list: give texts, or lists of token ids.")
    sequences = []
    for i, text in enumerate(listed):
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError("the reference is text and the model has no tokenizer: give lists of token ids.")
            text = tokenizer(text)["input_ids"]
        elif hasattr(text, "tolist"):
            text = text.tolist()
        if not isinstance(text, list | tuple) or not all(isinstance(token, int) for token in text):
            raise TypeError(f"text {i} of the reference is neither a string nor a list of token ids.")
        if not text:
            raise ValueError(f"text {i} of the reference has no tokens.")
        sequences.append(list(text))
    return sequences
