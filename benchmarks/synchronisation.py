"""Whether a decode step under a probe makes the host wait for the device more often than the bare host does.

A wait (a value read back, a copy to the host) costs little on a CPU and much on a card: the launches behind it queue up
late. Events are counted by torch.profiler in two generations of different length; the difference, divided by the
difference of their lengths, is what one decode step adds. Prompt and results do not enter: they are in both.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import attnprobe as ap
from benchmarks.variants import Subject, generate

# the profiler announces every start and stop otherwise
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# by prefix of the event's name; on a CPU the first two alone exist
EVENTS = (
    "aten::item",
    "aten::_local_scalar_dense",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "Memcpy DtoH",
    "aten::nonzero",
)
SHORT = 4
STEPS = 64  # a whole number of the blocks in which decode rows are handed to the analyzers


def analyzer_sets() -> dict[str, list[ap.Analyzer]]:
    """What is attached: nothing, then the analyzers."""
    four = [ap.MeanRoutingSplit(bound=False), ap.SpectralEntropyBound(), ap.TransportCapacity(), ap.Asymmetry()]
    return {
        "bare": [],
        "without-tdo": four,
        "five": [ap.IntrinsicTDO(), ap.MeanRoutingSplit(), *four[1:]],
        "five-traced": [
            ap.IntrinsicTDO(trace=True),
            ap.MeanRoutingSplit(trace=True),
            ap.SpectralEntropyBound(trace=True),
            ap.TransportCapacity(trace=True),
            ap.Asymmetry(trace=True),
        ],
    }


def waits_per_step(subject: Subject) -> dict[str, dict[str, float]]:
    """For each set of analyzers: event -> how many of it one decode step has."""
    return {name: _per_step(subject, analyzers) for name, analyzers in analyzer_sets().items()}


def added(waits: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """What each set adds to the bare host."""
    bare = waits["bare"]
    probed = {name: mine for name, mine in waits.items() if name != "bare"}
    return {name: {event: mine[event] - bare[event] for event in mine} for name, mine in probed.items()}


def _per_step(subject: Subject, analyzers: list[ap.Analyzer]) -> dict[str, float]:
    short, long = (_count(subject, analyzers, length) for length in (SHORT, SHORT + STEPS))
    return {event: (long[event] - short[event]) / STEPS for event in EVENTS}


def _count(subject: Subject, analyzers: list[ap.Analyzer], new_tokens: int) -> Counter[str]:
    subject = dataclasses.replace(subject, workload=dataclasses.replace(subject.workload, new_tokens=new_tokens))
    cuda = subject.workload.device.startswith("cuda")
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with torch.no_grad(), profile(activities=activities) as profiler:
        if analyzers:
            with ap.Probe(analyzers, layers="middle").attach(subject.model):
                generate(subject)
        else:
            generate(subject)
        if cuda:
            torch.cuda.synchronize()
    recorded = profiler.profiler
    assert recorded is not None
    counts: Counter[str] = Counter()
    # the events as they were recorded: sorting them into averages takes minutes where generating took seconds
    for event in recorded.kineto_results.events():
        counts.update(name for name in EVENTS if event.name().startswith(name))
    return counts


def as_json(waits: dict[str, dict[str, float]]) -> dict[str, Any]:
    return {"steps": STEPS, "events_per_decode_step": waits, "added_by_the_probe": added(waits)}
