"""Measuring variants: interleaved rounds of time, and peak memory.

Machines differ from minute to minute, so nothing is compared across rounds. Each round runs every variant once, each
round in another order, and a variant's ratio and seconds above bare are taken against the bare host of its own round.

On a CPU time is that of the processor, on one thread: wall time without what other processes took. On CUDA it is wall
time between two synchronisations.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import attnprobe as ap
from benchmarks.own_time import own_time
from benchmarks.peak_memory import peak_of_fresh_process
from benchmarks.state_size import state_bytes
from benchmarks.variants import NotEnoughMemory, NotInstalled, Run, Subject, Variant, ignore
from benchmarks.workload import Workload


@dataclass
class Figures:
    """What was measured of one variant on one workload.

    Attributes:
        status: "ok", "not installed", "out of memory" or "failed"; `reason` says why in the last three.
        seconds: of each round.
        bare_seconds: of the bare host in the same rounds.
        own_seconds: of each round, inside the probe's own calls; empty without a probe, and on CUDA.
        peak_mb: what a run adds at its peak to the memory held before, of a fresh process (CPU) or of tensors on the
            card (CUDA).
        bare_peak_mb: the same of the bare host.
        state_bytes: tensors that the probe's analyzers hold at the end, None without a probe.
        same_tokens: the same tokens as the bare host, None if that did not run.
    """

    workload: Workload
    variant: str
    status: str = "ok"
    reason: str | None = None
    seconds: list[float] = field(default_factory=list)
    bare_seconds: list[float] = field(default_factory=list)
    own_seconds: list[float] = field(default_factory=list)
    peak_mb: float | None = None
    bare_peak_mb: float | None = None
    state_bytes: int | None = None
    same_tokens: bool | None = None

    def note_state(self, probe: ap.Probe) -> None:
        self.state_bytes = state_bytes(probe)

    @property
    def ratios(self) -> list[float]:
        return [mine / bare for mine, bare in zip(self.seconds, self.bare_seconds, strict=True)]

    @property
    def own_ratios(self) -> list[float]:
        """Total time over what is left without the probe's own calls, by round."""
        return [total / (total - own) for total, own in zip(self.seconds, self.own_seconds, strict=False) if own]

    @property
    def above(self) -> list[float]:
        """Seconds above bare, by round."""
        return [mine - bare for mine, bare in zip(self.seconds, self.bare_seconds, strict=True)]

    @property
    def peak_mb_above(self) -> float | None:
        if self.peak_mb is None or self.bare_peak_mb is None:
            return None
        return self.peak_mb - self.bare_peak_mb

    def as_json(self) -> dict[str, Any]:
        """The figures of one row of the results; see `benchmarks/run.py` for the schema."""
        return {
            "host": self.workload.host,
            "variant": self.variant,
            "status": self.status,
            "reason": self.reason,
            "seconds": spread(self.seconds),
            "ratio": spread(self.ratios),
            "own_ratio": spread(self.own_ratios),
            "seconds_above_bare": spread(self.above),
            "peak_mb": self.peak_mb,
            "peak_mb_above_bare": self.peak_mb_above,
            "state_bytes": self.state_bytes,
            "same_tokens_as_bare": self.same_tokens,
        }


def spread(values: list[float]) -> dict[str, Any] | None:
    """Median, extremes and the single rounds; None without any."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": values}


def measure(subject: Subject, variants: list[Variant], *, repeats: int, memory: bool) -> list[Figures]:
    """Figures of the variants, the bare host being the first of them."""
    figures = [Figures(subject.workload, variant.name) for variant in variants]
    with torch.no_grad():
        runs = _prepare(subject, variants, figures)
        for repeat in range(repeats):
            _round(subject, runs, repeat)
    running = [figure for figure, _ in runs]
    if memory and subject.workload.device == "cpu":
        for figure in running:
            figure.peak_mb = peak_of_fresh_process(subject.workload, figure.variant)
    bare = next((figure for figure in running if figure.variant == "bare"), None)
    if bare is not None:
        for figure in running:
            figure.bare_seconds = bare.seconds
            figure.bare_peak_mb = bare.peak_mb
    return figures


def _prepare(subject: Subject, variants: list[Variant], figures: list[Figures]) -> list[tuple[Figures, Run]]:
    """Run everything once: that warms up, shows what can run here, and that the work is done."""
    ready = []
    bare_tokens: Tensor | None = None
    for variant, figure in zip(variants, figures, strict=True):
        with _noting_failure(figure):
            run = variant.make(subject)
            tokens = run(figure.note_state).cpu()
            check_tokens(tokens, subject.workload)
            if variant.name == "bare":
                bare_tokens = tokens
            if bare_tokens is not None:
                figure.same_tokens = bool(torch.equal(tokens, bare_tokens))
            ready.append((figure, run))
    return ready


def check_tokens(tokens: Tensor, workload: Workload) -> None:
    """Raise unless as many tokens were generated as were asked for: otherwise times would not compare."""
    expected = (workload.batch, workload.new_tokens)
    if tuple(tokens.shape) != expected:
        raise RuntimeError(f"tokens of shape {tuple(tokens.shape)} and not {expected}: the answer ended early.")


@contextmanager
def _noting_failure(figure: Figures) -> Iterator[None]:
    """One variant that cannot run does not stop the others; its row says why."""
    try:
        yield
    except NotInstalled as error:
        figure.status, figure.reason = "not installed", str(error)
    except (NotEnoughMemory, torch.OutOfMemoryError) as error:
        figure.status, figure.reason = "out of memory", str(error).splitlines()[0]
    except Exception as error:
        figure.status, figure.reason = "failed", f"{type(error).__name__}: {error}"
    if (
        figure.status == "out of memory" and torch.cuda.is_available()
    ):  # here the error, and the tensors its frames held, are gone
        torch.cuda.empty_cache()


def _round(subject: Subject, runs: list[tuple[Figures, Run]], repeat: int) -> None:
    turn = repeat % len(runs) if runs else 0
    clock = _on_cuda if subject.workload.device.startswith("cuda") else _on_cpu
    for figure, run in runs[turn:] + runs[:turn]:
        seconds, own_seconds, peak_mb = clock(run)
        figure.seconds.append(seconds)
        figure.own_seconds.append(own_seconds)
        if peak_mb is not None:
            figure.peak_mb = max(peak_mb, figure.peak_mb or 0.0)


def _on_cpu(run: Callable[..., object]) -> tuple[float, float, None]:
    with own_time() as own:
        start = time.process_time()
        run(ignore)
        return time.process_time() - start, own.seconds, None


def _on_cuda(run: Callable[..., object]) -> tuple[float, float, float]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    run(ignore)
    torch.cuda.synchronize()
    return time.perf_counter() - start, 0.0, (torch.cuda.max_memory_allocated() - before) / 1e6
