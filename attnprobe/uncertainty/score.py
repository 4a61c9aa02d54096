"""`score`: from prompts to answers with their uncertainty, in one pass of the model."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnprobe.analyzers import Analyzer
from attnprobe.analyzers.lookback import SelfAttention
from attnprobe.hosts import Host, host_of
from attnprobe.probe import Probe
from attnprobe.probe_settings import named_layers
from attnprobe.uncertainty.decode import Decoded, Decoding, generate, greedy, read, sampler
from attnprobe.uncertainty.evidence import Evidence
from attnprobe.uncertainty.method import Assessment, Method
from attnprobe.uncertainty.registry import AnyMethod, resolve
from attnprobe.uncertainty.sampled import SampledMethod, Samples
from attnprobe.uncertainty.sampling import Sample, Sampling, SamplingSettings, seed_of

if TYPE_CHECKING:
    import pandas as pd

Prompt = str | Sequence[int]


@dataclass(frozen=True, eq=False)
class Score:
    """One answer and how uncertain the model was about it.

    Attributes:
        prompt: the text of the prompt (decoded, where token ids were given; "" without a tokenizer).
        text: the answer without special tokens, cut at a stop string ("" without a tokenizer).
        uncertainty: method name -> number; higher = less certain.
        tokens: a row a generated token: step, token, token_id, probability, log_probability (nats), entropy (nats);
            with a recurrent method also layer, head, signal and confidence of the layer that set its score.
        finish: why the answer ended: "eos", "stop", "length" or "given".
        prompt_ids, token_ids: the token ids that the model saw and gave.
        assessments: method name -> `Assessment` with every layer.
        samples: the sampled answers, where a method asks for some (those of the first such method; each method's own
            are in its assessment).
    """

    prompt: str
    text: str
    uncertainty: dict[str, float]
    tokens: pd.DataFrame = field(repr=False)
    finish: str
    prompt_ids: list[int] = field(repr=False)
    token_ids: list[int] = field(repr=False)
    assessments: dict[str, Assessment] = field(repr=False)
    samples: list[Sample] = field(default_factory=list, repr=False)

    def layers(self, method: str | None = None) -> pd.DataFrame:
        """Signal and confidence of every layer and step of a recurrent method (the first one by default).

        Raises:
            ValueError: the method was not asked for, or has no layers.
        """
        names = [name for name, assessment in self.assessments.items() if assessment.layers]
        if method is None and names:
            method = names[0]
        if method not in names:
            raise ValueError(f"{method!r} has no layers here; methods that do: {', '.join(names) or 'none'}.")
        return self.assessments[method].table()


def score(
    model: Any,
    prompts: Prompt | Sequence[Prompt],
    *,
    methods: str | AnyMethod | Iterable[str | AnyMethod] = ("SAUQ",),
    completions: Prompt | Sequence[Prompt] | None = None,
    max_new_tokens: int = 20,
    chat: bool = False,
    batch_size: int = 8,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    rows: str = "error",
) -> list[Score]:
    """Generate answers (or read given ones) and score them, every single-pass method in the same pass.

    Sampled methods draw further answers to the prompt, which share its cache and one set of samples.

    Args:
        model: what `load_model` gives: a TransformerBridge or HookedTransformer, or a plain transformers decoder.
        prompts: a string, a list of strings, or a list of token-id lists. Strings are tokenized as the tokenizer does
            by itself.
        methods: names (`attnprobe.uncertainty.method_names()`) or objects such as `SAUQ(measure="counting")`.
        completions: answers to score instead of generating, one for each prompt; strings (tokenized apart from the
            prompt, without special tokens: begin them with the space that parts them) or token-id lists. A generated
            answer ends with the end-of-text token; a given one has it only if you write it.
        max_new_tokens: length limit of generated answers, 20 tokens.
        chat: put each string into the model's chat template as the user's message.
        batch_size: prompts a forward, and samples a forward; greedy answers and their numbers do not depend on it.
        do_sample, temperature, top_k, top_p, seed: sampling; greedy by default, whatever the checkpoint's settings
            say. Probabilities and entropies are the model's own, before any of these. Sampled methods (SemanticEntropy,
            LUQ) have settings of their own for the samples they draw beside the answer, and use `seed` alone.
        stop: strings that end an answer; the text is cut before them, the tokens that complete them are scored.
        tokenizer: used instead of `model.tokenizer`.
        rows: policy for models whose rows do not sum to 1, as in `Probe`.

    Returns:
        A list of `Score`, in the order of the prompts.

    Raises:
        ValueError, TypeError: what is wrong with the input, in one sentence.

    Example::

        model = attnprobe.load_model()
        out = attnprobe.score(model, "What is the capital of France?", chat=True)
        out[0].text, out[0].uncertainty["SAUQ"]

    Source: [SG] arXiv 2610.06012 (SAUQ); each method names its own.
    """
    resolved = resolve(methods)
    chosen = [method for method in resolved if isinstance(method, Method)]
    host = host_of(model)
    tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    prompt_ids = _prompt_ids(prompts, tokenizer, chat)
    completion_ids = None if completions is None else _completion_ids(completions, tokenizer, len(prompt_ids))
    _check_count("max_new_tokens", max_new_tokens)
    _check_count("batch_size", batch_size)
    _check_vocabulary(prompt_ids, completion_ids or [], host.vocabulary)
    _check_context(prompt_ids, completion_ids, max_new_tokens, host.context)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer)):
        raise TypeError(f"seed={seed!r}: use a whole number.")
    choose = sampler(_device(model), temperature, top_k, top_p, seed) if do_sample else greedy
    how = Decoding(
        max_new_tokens=max_new_tokens,
        choose=choose,
        stop_tokens=_stop_tokens(model, tokenizer),
        stopped=_stop_strings(stop, tokenizer),
    )
    sampling = None
    sampled = [method for method in resolved if isinstance(method, SampledMethod)]
    if sampled:
        _need_tokenizer(tokenizer, "sampled answers")
        _check_context(prompt_ids, None, max_new_tokens, host.context)
        text = functools.partial(_text, tokenizer=tokenizer, stop=stop)
        for method in sampled:
            method.prepare()
        sampling = Sampling(host, how, _device(model), batch_size, seed_of(seed), text)
    scores: list[Score] = []
    for low in range(0, len(prompt_ids), batch_size):
        batch = prompt_ids[low : low + batch_size]
        given = None if completion_ids is None else completion_ids[low : low + batch_size]
        answered = _score_batch(host, chosen, batch, given, how, tokenizer, rows, stop)
        if sampling is not None:
            answered = [_with_sampled(one, resolved, sampling, low + i) for i, one in enumerate(answered)]
        scores += answered
    return scores


def _score_batch(
    host: Host,
    methods: list[Method],
    prompts: list[list[int]],
    completions: list[list[int]] | None,
    how: Decoding,
    tokenizer: Any,
    rows: str,
    stop: str | Sequence[str] | None,
) -> list[Score]:
    device = _device(host.model)
    analyzers = _analyzers(methods, host)
    watched = sorted({int(layer) for analyzer in analyzers for layer in analyzer.layers or ()})
    probe = Probe(analyzers, layers=watched, logits=True, rows=rows)
    last_row = any(method.needs_last_row for method in methods)
    prompt_lengths = [len(prompt) for prompt in prompts]
    with torch.no_grad(), probe.attach(host.model, prompt_lengths=prompt_lengths):
        if completions is None:
            decoded = generate(host, probe, prompts, how, device, last_row)
        else:
            decoded = read(host, probe, prompts, completions, device, last_row)
    results = probe.results()
    return [
        _score(prompt, answer, Evidence.of(results, i, len(answer.tokens)), methods, tokenizer, stop)
        for i, (prompt, answer) in enumerate(zip(prompts, decoded, strict=True))
    ]


def _with_sampled(score: Score, methods: list[AnyMethod], sampling: Sampling, number: int) -> Score:
    """The score of one prompt with the sampled methods too, in the order that was asked for."""
    samples: dict[SamplingSettings, Samples] = {}
    assessments: dict[str, Assessment] = {}
    for method in methods:
        if isinstance(method, Method):
            assessments[method.name] = score.assessments[method.name]
            continue
        if method.settings not in samples:
            samples[method.settings] = Samples(sampling.draw(score.prompt_ids, number, method.settings))
        assessments[method.name] = method.assess_samples(samples[method.settings])
    return replace(
        score,
        uncertainty={name: assessment.uncertainty for name, assessment in assessments.items()},
        assessments=assessments,
        samples=list(next(iter(samples.values())).samples),
    )


def _score(
    prompt: list[int],
    answer: Decoded,
    evidence: Evidence,
    methods: list[Method],
    tokenizer: Any,
    stop: str | Sequence[str] | None,
) -> Score:
    assessments = {method.name: method.assess(evidence) for method in methods}
    return Score(
        prompt="" if tokenizer is None else tokenizer.decode(prompt),
        text=_text(answer.tokens, answer.finish, tokenizer, stop),
        uncertainty={name: assessment.uncertainty for name, assessment in assessments.items()},
        tokens=_table(answer.tokens, evidence, assessments, tokenizer),
        finish=answer.finish,
        prompt_ids=list(prompt),
        token_ids=answer.tokens,
        assessments=assessments,
    )


def _text(tokens: list[int], finish: str, tokenizer: Any, stop: str | Sequence[str] | None) -> str:
    text: str = "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
    if finish == "stop":
        text = min((text.split(mark, 1)[0] for mark in _strings(stop)), key=len)
    return text


def _table(tokens: list[int], evidence: Evidence, assessments: dict[str, Assessment], tokenizer: Any) -> pd.DataFrame:
    import pandas as pd

    table = pd.DataFrame(
        {
            "step": np.arange(1, len(tokens) + 1),
            "token": [str(token) if tokenizer is None else tokenizer.decode([token]) for token in tokens],
            "token_id": tokens,
            "probability": np.exp(evidence.log_probability),
            "log_probability": evidence.log_probability,
            "entropy": evidence.entropy,
        }
    )
    deciding = next((a.deciding for a in assessments.values() if a.deciding is not None), None)
    if deciding is not None:
        table["layer"] = deciding.layer
        table["head"] = deciding.head
        table["signal"] = deciding.signal
        table["confidence"] = deciding.confidence
    return table


def _analyzers(methods: list[Method], host: Host) -> list[Analyzer]:
    """What all methods need, each analyzer once, at the layers of those that need it."""
    needed: dict[str, Analyzer] = {}
    layers: dict[str, set[int]] = {}
    for method in methods:
        for analyzer in method.analyzers():
            needed.setdefault(repr(analyzer), analyzer)
            layers.setdefault(repr(analyzer), set()).update(_layers(method.layers, host))
    # a probe watches something: token scores alone still need to know where sequences begin and end
    if not needed:
        return [SelfAttention(final=False, trace=True).at([min(_sites(host))])]
    return [analyzer.at(sorted(layers[name])) for name, analyzer in needed.items()]


def _sites(host: Host) -> set[int]:
    return {site.layer for site in host.sites("blocks.*.attn.hook_pattern")}


def _layers(layers: str | Sequence[int], host: Host) -> set[int]:
    """The numbers of the layers that a method reads."""
    sites = _sites(host)
    if layers == "all":
        return sites
    n_layers = max(host.n_layers or 0, max(sites) + 1)
    if isinstance(layers, str):
        named = set(named_layers(layers, n_layers))
        return named & sites or named  # of a range, the layers with attention count; where none has, the probe says so
    return {int(n) for n in layers}


def _prompt_ids(prompts: Prompt | Sequence[Prompt], tokenizer: Any, chat: bool) -> list[list[int]]:
    listed = _listed(prompts, "prompts")
    ids = []
    for i, prompt in enumerate(listed):
        if isinstance(prompt, str):
            _need_tokenizer(tokenizer, "prompts")
            _check_text(prompt, f"prompt {i}")
            ids.append(_chat(prompt, tokenizer) if chat else list(tokenizer(prompt)["input_ids"]))
        elif chat:
            raise ValueError("chat=True puts text into the chat template: give strings, not token ids.")
        else:
            ids.append(_token_ids(prompt, f"prompt {i}"))
        if not ids[-1]:
            raise ValueError(f"prompt {i} is empty: a model needs at least one token to go on from.")
    return ids


def _completion_ids(completions: Prompt | Sequence[Prompt], tokenizer: Any, n_prompts: int) -> list[list[int]]:
    listed = _listed(completions, "completions")
    if len(listed) != n_prompts:
        raise ValueError(f"there are {len(listed)} completions for {n_prompts} prompts: give one for each.")
    ids = []
    for i, completion in enumerate(listed):
        if isinstance(completion, str):
            _need_tokenizer(tokenizer, "completions")
            _check_text(completion, f"completion {i}")
            ids.append(list(tokenizer(completion, add_special_tokens=False)["input_ids"]))
        else:
            ids.append(_token_ids(completion, f"completion {i}"))
        if not ids[-1]:
            raise ValueError(f"completion {i} is empty: there is no token to be uncertain about.")
    return ids


def _listed(given: Any, what: str) -> list[Any]:
    """One prompt or many, as a list of strings and token-id lists."""
    if isinstance(given, str):
        return [given]
    if hasattr(given, "tolist"):  # tensors and arrays of token ids
        given = given.tolist()
    if not isinstance(given, list | tuple):
        raise TypeError(f"{what} must be a string or a list, not {type(given).__name__}.")
    listed = list(given)
    if not listed:
        raise ValueError(f"{what} is empty: give at least one.")
    if all(isinstance(item, int | np.integer) for item in listed):
        return [listed]
    listed = [item.tolist() if hasattr(item, "tolist") else item for item in listed]
    for item in listed:
        if not isinstance(item, str | list | tuple):
            raise TypeError(f"{what} must be strings or lists of token ids, not {type(item).__name__}.")
    return listed


def _check_text(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{what} is not valid Unicode text: it holds bytes that are no characters.") from None


def _token_ids(given: Sequence[Any], what: str) -> list[int]:
    for token in given:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(f"{what} holds {token!r}, which is not a token id: give whole numbers, or a string.")
    return [int(token) for token in given]


def _check_vocabulary(prompts: list[list[int]], completions: list[list[int]], size: int | None) -> None:
    for what, sequences in (("prompt", prompts), ("completion", completions)):
        for i, ids in enumerate(sequences):
            wrong = [token for token in ids if token < 0 or (size is not None and token >= size)]
            if wrong:
                raise ValueError(f"{what} {i} holds token id {wrong[0]}, outside the model's vocabulary of {size}.")


def _check_context(
    prompts: list[list[int]], completions: list[list[int]] | None, max_new_tokens: int, context: int | None
) -> None:
    for i, prompt in enumerate(prompts):
        total = len(prompt) + (max_new_tokens if completions is None else len(completions[i]))
        if context is not None and total > context:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens and makes {total} with its answer, and the model reads at most "
                f"{context}: shorten it, or ask for fewer new tokens."
            )


def _chat(prompt: str, tokenizer: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat=True needs a chat template and this tokenizer has none: format the prompt yourself.")
    message = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(encoded["input_ids"])


def _need_tokenizer(tokenizer: Any, what: str) -> None:
    if tokenizer is None:
        raise ValueError(f"{what} are text and the model has no tokenizer: pass tokenizer=, or lists of token ids.")


def _stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    original = getattr(model, "original_model", model)
    found: list[int] = []
    for holder in (getattr(original, "generation_config", None), getattr(model, "cfg", None), tokenizer):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            found += [value] if isinstance(value, int) else list(value)
    return tuple(dict.fromkeys(int(token) for token in found))


def _strings(stop: str | Sequence[str] | None) -> list[str]:
    if stop is None:
        return []
    if not isinstance(stop, str | list | tuple):
        raise TypeError(f"stop={stop!r}: give a string or a list of strings.")
    return [stop] if isinstance(stop, str) else list(stop)


def _stop_strings(stop: str | Sequence[str] | None, tokenizer: Any) -> Any:
    marks = _strings(stop)
    if not marks:
        return None
    if not all(isinstance(mark, str) for mark in marks):
        raise TypeError(f"stop={stop!r}: give a string or a list of strings.")
    if "" in marks:
        raise ValueError("an empty stop string ends every answer before it begins: leave it out.")
    _need_tokenizer(tokenizer, "stop strings")

    def stopped(tokens: list[int]) -> bool:
        # a mark may span special tokens, or be one
        texts = [tokenizer.decode(tokens, skip_special_tokens=skip) for skip in (True, False)]
        return any(mark in text for mark in marks for text in texts)

    return stopped


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}={value!r}: use a whole number of at least 1.")


def _device(model: Any) -> torch.device:
    """Where tokens go: to the first weights that are anywhere. Offloaded ones wait on no device for their turn."""
    anywhere = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    return next(anywhere, torch.device("cpu"))
