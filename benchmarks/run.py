"""What watching costs: time and memory beside the bare host of the same run, on either host library.

    python benchmarks/run.py --quick                          # under two minutes on one CPU thread
    python benchmarks/run.py --prompt 512 --new-tokens 32 --repeats 9 --output results.json
    python benchmarks/run.py --axis prompt --host transformers --variants five,five-sketch,lm-polygraph-rauq
    python benchmarks/run.py --scaling --host transformers    # exponents of n, each analyzer alone
    python benchmarks/run.py --device cuda --model random-llama-1b --dtype bfloat16 --prompt 4096 --new-tokens 128
    ... the same with --waits                                 # also what a decode step waits for
    python benchmarks/run.py --waits --variants bare --repeats 0 --no-memory   # that alone

An option that takes several values (separated by commas, or given again) is an axis: every combination is measured.
`--axis NAME` gives one of them its usual values. Variants are described in `benchmarks/variants.py`, the measuring in
`benchmarks/measure.py`. The variant `lm-polygraph-rauq` needs `pip install lm-polygraph==0.7.0`.

The results file is one JSON object:

    schema: 1
    machine: {cpu, cores, threads, card, python, system, versions: {package: version or null}}
    settings: {repeats, memory, command}
    points: a list, one for each workload:
        workload: {host, model, device, dtype, prompt, new_tokens, batch, heads}; heads null means all
        rows: a list, one for each variant, the bare host first:
            host, variant
            status: "ok", "not installed", "out of memory" or "failed"; reason: a sentence, or null
            seconds, ratio, seconds_above_bare, own_ratio: {median, min, max, rounds: [..]} or null; ratio and
                seconds_above_bare compare with the bare host of the same round, own_ratio is the total over the total
                less the probe's own calls (null without a probe, and on CUDA)
            peak_mb, peak_mb_above_bare: what a run adds at its peak to the memory held before, of a fresh process
                (CPU) or of tensors on the card (CUDA), or null
            state_bytes: tensors that the analyzers hold at the end, or null
            same_tokens_as_bare: true, false or null
    scaling: a list (empty without --scaling), one for each host and analyzer:
        host, variant, n: [..], seconds, peak_mb, state_bytes: [..] above bare, null where not above noise,
        slopes: {seconds, peak_mb, state_bytes}: exponents of n, or null
        slopes_at_the_end: the same over the three longest texts
    waits: an object (empty without --waits): host -> {steps, events_per_decode_step: {analyzers: {event: count}},
        added_by_the_probe: the same less the bare host}
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import typer
from rich.console import Console

from benchmarks import machine, report, scaling, synchronisation
from benchmarks.measure import Figures, measure
from benchmarks.variants import Subject, Variant, variants_of
from benchmarks.workload import EMBEDDED, HOSTS, Workload, load, prompt_ids

AXES = ("prompt", "new-tokens", "batch", "heads", "dtype", "device")


@dataclass(frozen=True)
class Plan:
    """What to measure: workloads in order, and how."""

    workloads: list[Workload]
    variants: list[str] | None
    repeats: int
    memory: bool
    scaling: bool = False
    waits: bool = False
    quick: bool = False

    def variants_for(self, host: str) -> list[Variant]:
        """Those that were named; or all, but for the scaling report the analyzers alone, and quickly all but those."""
        chosen = variants_of(host, self.variants)
        if self.variants or not (self.scaling or self.quick):
            return chosen
        return [variant for variant in chosen if variant.name == "bare" or variant.scaled == self.scaling]


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Short prompt, two rounds, no single analyzers, no peak memory.")
    ] = False,
    axis: Annotated[str | None, typer.Option(help=f"Vary one of: {', '.join(AXES)}.")] = None,
    host: Annotated[list[str] | None, typer.Option(help="transformer_lens, transformers; both by default.")] = None,
    variants: Annotated[list[str] | None, typer.Option(help="Variants beside the bare host; all by default.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt tokens. [512]")] = None,
    new_tokens: Annotated[list[str] | None, typer.Option(help="New tokens. [32]")] = None,
    batch: Annotated[list[str] | None, typer.Option(help="Sequences at once. [1]")] = None,
    heads: Annotated[list[str] | None, typer.Option(help="Heads a probe watches in each layer. [all]")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Such as bfloat16; the checkpoint's by default.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="cpu or cuda. [cpu]")] = None,
    model: Annotated[
        str, typer.Option(help="The embedded model, a folder or hub name, or random-llama-tiny, -1b, -8b.")
    ] = EMBEDDED,
    repeats: Annotated[
        int | None, typer.Option(min=0, help="Rounds, each of every variant once; 0: memory alone. [5]")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory (CPU: a process for each variant).")] = True,
    scaling_report: Annotated[bool, typer.Option("--scaling", help="Growth of each analyzer with the prompt.")] = False,
    waits: Annotated[
        bool, typer.Option("--waits", help="Count what a decode step waits for (torch.profiler).")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the results as JSON.")] = None,
) -> None:
    """Time and memory of watching, beside the bare host in the same run."""
    torch.set_num_threads(1)
    given = {"prompt": prompt, "new_tokens": new_tokens, "batch": batch, "heads": heads}
    given |= {"dtype": dtype, "device": device, "host": host}
    try:
        listed = {name: _split(values) for name, values in given.items() if values}
        plan = Plan(
            workloads=workloads(model, listed, axis=axis, quick=quick, scaled=scaling_report),
            variants=_split(variants) if variants else None,
            repeats=repeats if repeats is not None else (2 if quick else 5),
            memory=memory and not quick,
            scaling=scaling_report,
            waits=waits,
            quick=quick,
        )
        for workload in plan.workloads:
            plan.variants_for(workload.host)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    results: dict[str, Any] = {}
    for results in run(plan, Console()):  # after each point: a long run that is broken off leaves what it has
        if output:
            output.write_text(json.dumps(results, indent=2) + "\n")
    if any(row["status"] == "failed" for point in results["points"] for row in point["rows"]):
        raise typer.Exit(1)


def workloads(
    model: str, given: dict[str, list[str]], *, axis: str | None = None, quick: bool = False, scaled: bool = False
) -> list[Workload]:
    """Every combination of the values given, a host at a time.

    Raises:
        ValueError: an axis or value that is none.
    """
    if axis is not None and axis not in AXES:
        raise ValueError(f"unknown axis {axis!r}; the axes are {', '.join(AXES)}.")
    values: dict[str, Sequence[Any]] = {"host": HOSTS, "device": ["cpu"], "dtype": [None], "batch": [1]}
    values |= {"prompt": [48 if quick else 512], "new_tokens": [6 if quick else 32], "heads": [None]}
    if scaled:
        values |= {"prompt": scaling.PROMPTS, "new_tokens": [8]}
    if axis is not None:
        values |= {axis.replace("-", "_"): _usual(axis)}
    values |= {name: [_value(name, text) for text in texts] for name, texts in given.items()}
    order = ("device", "dtype", "host", "batch", "heads", "new_tokens", "prompt")
    combinations = itertools.product(*(values[name] for name in order))
    return [Workload(model=model, **dict(zip(order, combination, strict=True))) for combination in combinations]


def _usual(axis: str) -> list[Any]:
    """The values of an axis that is varied without saying how."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    usual: dict[str, list[Any]] = {
        "prompt": [128, 512, 2048],
        "new-tokens": [8, 32, 128],
        "batch": [1, 2, 4],
        "heads": [1, 4, None],
        "dtype": ["float32", "bfloat16"],
        "device": devices,
    }
    return usual[axis]


def _value(name: str, text: str) -> Any:
    if name in ("host", "device", "dtype"):
        return text
    if name == "heads" and text == "all":
        return None
    if not text.isdigit():
        raise ValueError(f"{name.replace('_', '-')} {text!r}: give whole numbers.")
    return int(text)


def _split(values: Sequence[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def run(plan: Plan, console: Console, loader: Callable[[Workload], Any] = load) -> Iterator[dict[str, Any]]:
    """Measure everything, printing each table as it is done; after each point, the results so far."""
    facts = machine.facts()
    report.print_machine(console, facts)
    points: list[list[Figures]] = []
    results: dict[str, Any] = {
        "schema": 1,
        "machine": facts,
        "settings": {"repeats": plan.repeats, "memory": plan.memory, "command": sys.argv[1:]},
        "points": [],
        "scaling": [],
        "waits": {},
    }
    for subject in _subjects(plan.workloads, loader):
        workload = subject.workload
        if plan.waits:
            counted = synchronisation.waits_per_step(subject)
            report.print_waits(console, workload.host, counted)
            results["waits"][workload.host] = synchronisation.as_json(counted)
        point = measure(subject, plan.variants_for(workload.host), repeats=plan.repeats, memory=plan.memory)
        report.print_figures(console, point)
        points.append(point)
        rows = [figure.as_json() for figure in point]
        results["points"].append({"workload": dataclasses.asdict(workload), "rows": rows})
        yield results
    if plan.scaling:
        grown = _growth(points, plan)
        report.print_growth(console, grown)
        results["scaling"] = [one.as_json() for one in grown]
        yield results


def _subjects(listed: Sequence[Workload], loader: Callable[[Workload], Any]) -> Iterator[Subject]:
    """Models are large: one at a time, loaded once for the workloads that share it."""
    for _, group in itertools.groupby(listed, key=lambda workload: workload.loaded_as):
        several = list(group)
        model = loader(several[0])
        for workload in several:
            yield Subject(model, prompt_ids(model, workload), workload)
        del model


def _growth(points: list[list[Figures]], plan: Plan) -> list[scaling.Growth]:
    grown = []
    for host in dict.fromkeys(workload.host for workload in plan.workloads):
        here = [point for point in points if point[0].workload.host == host]
        names = [variant.name for variant in plan.variants_for(host) if variant.name != "bare"]
        grown += scaling.growth(here, names)
    return grown


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
