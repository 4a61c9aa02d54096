"""The variants that are compared: the bare host, the host under a probe, scores, and what others do.

Every variant reads the same prompt, generates the same number of tokens greedily, and returns them, so that it can be
checked that it did the work. Results are part of the work: a probe's are computed, a score is a number at the end.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import attnprobe as ap
from attnprobe.probe_settings import middle_layers
from benchmarks import machine
from benchmarks.workload import HOSTS, Workload, attention


class NotInstalled(Exception):
    """A variant needs a package that is not here."""


class NotEnoughMemory(Exception):
    """A variant would keep more than there is: said beforehand, where a process would be killed without a word."""


def ignore(probe: ap.Probe) -> None:
    """Look at nothing."""


class Run(Protocol):
    """Does the work of a variant once."""

    def __call__(self, inspect: Callable[[ap.Probe], None] = ignore) -> Tensor:
        """Generate, and return the new tokens [batch, step]; `inspect` sees a probe before its results are taken."""


@dataclass(frozen=True)
class Subject:
    """A loaded model with its prompt."""

    model: Any
    ids: Tensor
    workload: Workload


@dataclass(frozen=True)
class Variant:
    """One way to generate.

    Attributes:
        name: for the command line and the tables.
        what: in one line.
        hosts: the host libraries it runs on.
        make: the work, ready to run.
        scaled: an analyzer alone, of the scaling report.
    """

    name: str
    what: str
    hosts: tuple[str, ...]
    make: Callable[[Subject], Run]
    scaled: bool = False


def variants_of(host: str, names: list[str] | None = None) -> list[Variant]:
    """The variants of a host library, the bare host first; with names, those and the bare host.

    Raises:
        ValueError: a name that no host knows.
    """
    known = {variant.name for variant in VARIANTS}
    unknown = sorted(set(names or ()) - known)
    if unknown:
        raise ValueError(f"unknown variants {', '.join(unknown)}; there are {', '.join(sorted(known))}.")
    here = [variant for variant in VARIANTS if host in variant.hosts]
    return [variant for variant in here if not names or variant.name == "bare" or variant.name in names]


# --- the bare hosts -----------------------------------------------------------------------------------------


def generate(subject: Subject, **extra: Any) -> Any:
    """Greedy generation as the host library does it: token ids [batch, prompt + new], or what `extra` asks for."""
    options: dict[str, Any] = {"max_new_tokens": subject.workload.new_tokens, "do_sample": False}
    if subject.workload.host == "transformer_lens":
        options |= {"stop_at_eos": False, "verbose": False}
    return subject.model.generate(subject.ids, **options, **extra)


def _new(subject: Subject, sequences: Tensor) -> Tensor:
    return sequences[:, subject.ids.shape[1] :]


def _bare(subject: Subject) -> Run:
    def run(inspect: Callable[[ap.Probe], None] = ignore) -> Tensor:
        return _new(subject, generate(subject))

    return run


def _eager(subject: Subject) -> Run:
    def run(inspect: Callable[[ap.Probe], None] = ignore) -> Tensor:
        with attention(subject.model, "eager"):
            return _new(subject, generate(subject))

    return run


def _attentions(subject: Subject) -> Run:
    _check_room(subject, subject.model.config.num_hidden_layers)

    def run(inspect: Callable[[ap.Probe], None] = ignore) -> Tensor:
        with attention(subject.model, "eager"):
            output = generate(subject, output_attentions=True, return_dict_in_generate=True)
        assert output.attentions is not None, "no attention was returned: the figures would not compare"
        return _new(subject, output.sequences)

    return run


def _check_room(subject: Subject, patterns: int) -> None:
    """Raise where so many layers' patterns of the whole text do not fit."""
    original = getattr(subject.model, "original_model", subject.model)
    workload = subject.workload
    n = workload.prompt + workload.new_tokens
    size = next(original.parameters()).element_size()
    needed = patterns * workload.batch * original.config.num_attention_heads * n * n * size
    free = machine.free_bytes(workload.device)
    if free is not None and needed > free:
        raise NotEnoughMemory(f"keeping the patterns takes {needed / 1e9:.0f} GB and {free / 1e9:.0f} GB are free")


def _keep_and_recompute(subject: Subject) -> Run:
    """Every pattern of the middle layers kept, participation ratio of all heads recomputed at each step."""
    _check_room(subject, len(middle_layers(subject.model.cfg.n_layers)) + 3)  # and three that come and go

    def run(inspect: Callable[[ap.Probe], None] = ignore) -> Tensor:
        layers = middle_layers(subject.model.cfg.n_layers)
        kept: dict[int, list[Tensor]] = {layer: [] for layer in layers}

        def keep(pattern: Tensor, hook: Any) -> None:
            rows = kept[int(hook.name.split(".")[1])]
            rows.append(pattern.detach())
            n = pattern.shape[-1]
            full = torch.cat([torch.nn.functional.pad(r, (0, n - r.shape[-1])) for r in rows], -2)
            half = full / full.sum(-2, keepdim=True).sqrt()
            gram = half @ half.mT
            _ = gram.diagonal(dim1=-2, dim2=-1).sum(-1).square() / (n * gram.square().sum((-2, -1)))

        with subject.model.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_pattern", keep) for layer in layers]):
            return _new(subject, generate(subject))

    return run


# --- under a probe ------------------------------------------------------------------------------------------


def _watched(analyzers: Callable[[], list[ap.Analyzer]]) -> Callable[[Subject], Run]:
    """The host under a probe on the middle layers. The analyzers are made when the variant is: some may be missing."""

    def make(subject: Subject) -> Run:
        heads = subject.workload.heads
        watched = analyzers()

        def run(inspect: Callable[[ap.Probe], None] = ignore) -> Tensor:
            probe = ap.Probe(watched, layers="middle", heads="all" if heads is None else list(range(heads)))
            with probe.attach(subject.model):
                tokens = generate(subject)
            inspect(probe)
            probe.results()
            return _new(subject, tokens)

        return run

    return make


def _score(method: str) -> Callable[[Subject], Run]:
    def make(subject: Subject) -> Run:
        def run(inspect: Callable[[ap.Probe], None] = ignore) -> Tensor:
            scores = ap.score(
                subject.model,
                subject.ids.tolist(),
                max_new_tokens=subject.workload.new_tokens,
                methods=[method],
                batch_size=subject.workload.batch,
            )
            return torch.tensor([one.token_ids for one in scores])

        return run

    return make


def _four() -> list[ap.Analyzer]:
    return [ap.MeanRoutingSplit(bound=False), ap.SpectralEntropyBound(), ap.TransportCapacity(), ap.Asymmetry()]


def _five() -> list[ap.Analyzer]:
    return [ap.IntrinsicTDO(), ap.MeanRoutingSplit(), *_four()[1:]]


def _five_sketched() -> list[ap.Analyzer]:
    return [ap.IntrinsicTDO(method="sketch"), *_four()]


# --- what others do -----------------------------------------------------------------------------------------


def _lm_polygraph_rauq(subject: Subject) -> Run:
    try:
        importlib.import_module("lm_polygraph")
    except ImportError as error:
        raise NotInstalled(f"lm-polygraph is not installed ({error})") from error
    _check_room(subject, subject.model.config.num_hidden_layers)
    from benchmarks.lm_polygraph_rauq import rauq

    score = rauq(subject.model, subject.ids, subject.workload.new_tokens)

    def run(inspect: Callable[[ap.Probe], None] = ignore) -> Tensor:
        with attention(subject.model, "eager"):  # the library reads returned attentions, which sdpa does not give
            return score()

    return run


# --- all of them --------------------------------------------------------------------------------------------

_LENS, _PLAIN = HOSTS


def _alone(name: str, what: str, make: Callable[[], ap.Analyzer]) -> Variant:
    return Variant(name, what, HOSTS, _watched(lambda: [make()]), scaled=True)


VARIANTS = (
    Variant("bare", "the host's own generate (transformers: on sdpa)", HOSTS, _bare),
    Variant("eager", "the same on eager attention", (_PLAIN,), _eager),
    Variant("attentions", "eager, every attention returned and kept, nothing computed", (_PLAIN,), _attentions),
    _alone("tdo", "IntrinsicTDO, exact", lambda: ap.IntrinsicTDO()),
    _alone("tdo-sketch", "IntrinsicTDO, sketched", lambda: ap.IntrinsicTDO(method="sketch")),
    _alone("routing", "MeanRoutingSplit, no gain bound", lambda: ap.MeanRoutingSplit(bound=False)),
    _alone("entropy", "SpectralEntropyBound", lambda: ap.SpectralEntropyBound()),
    _alone("transport", "TransportCapacity", lambda: ap.TransportCapacity()),
    _alone("asymmetry", "Asymmetry", lambda: ap.Asymmetry()),
    Variant("five", "all five analyzers, exact", HOSTS, _watched(_five)),
    Variant("five-sketch", "all five, IntrinsicTDO sketched, no gain bound", HOSTS, _watched(_five_sketched)),
    Variant("without-tdo", "the four others, no gain bound", HOSTS, _watched(_four)),
    Variant("score-sauq", "score with SAUQ", HOSTS, _score("SAUQ")),
    Variant("keep-and-recompute", "every pattern kept, participation ratio each step", (_LENS,), _keep_and_recompute),
    Variant("lm-polygraph-rauq", "RAUQ of LM-Polygraph", (_PLAIN,), _lm_polygraph_rauq),
)
