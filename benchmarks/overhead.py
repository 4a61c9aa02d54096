"""What watching costs: time and peak memory of the bare host, the host under a probe, `score`, and the naive way.

    python benchmarks/overhead.py --prompt 512 --new-tokens 32 --repeats 5

Variants run interleaved in one process and one thread, in another order every round; the table gives the median of
each and the ratio to the bare host of the same round. Time is that of the processor, which on one thread is wall time
without what other processes took. Peak memory is what a fresh process has at its peak while the variant runs, the
loaded model included.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import attnprobe as ap
from attnprobe.probe import middle_layers

Run = Callable[[], object]


def variants(model: Any, ids: torch.Tensor, new_tokens: int) -> dict[str, Run]:
    """Each variant generates the same tokens."""

    def generate() -> torch.Tensor:
        return model.generate(ids, max_new_tokens=new_tokens, do_sample=False, stop_at_eos=False, verbose=False)

    def watched(*analyzers: ap.Analyzer) -> Run:
        def run() -> None:
            probe = ap.Probe(analyzers, layers="middle")
            with probe.attach(model):
                generate()
            probe.results()

        return run

    def score() -> None:
        (one,) = ap.score(model, ids.tolist(), max_new_tokens=new_tokens, methods=["SAUQ"])
        assert len(one.token_ids) == new_tokens, "the answer ended early: the times would not compare"

    def naive() -> None:
        """Every pattern of the middle layers kept, participation ratio of all heads recomputed at each step."""
        layers = middle_layers(model.cfg.n_layers)
        hooks = {layer: [] for layer in layers}

        def keep(pattern: torch.Tensor, hook: Any) -> None:
            rows = hooks[int(hook.name.split(".")[1])]
            rows.append(pattern.detach())
            n = pattern.shape[-1]
            full = torch.cat([torch.nn.functional.pad(r, (0, n - r.shape[-1])) for r in rows], -2)
            half = full / full.sum(-2, keepdim=True).sqrt()
            gram = half @ half.mT
            _ = gram.diagonal(dim1=-2, dim2=-1).sum(-1).square() / (n * gram.square().sum((-2, -1)))

        with model.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_pattern", keep) for layer in layers]):
            generate()

    five = (
        ap.IntrinsicTDO(),
        ap.MeanRoutingSplit(),
        ap.SpectralEntropyBound(),
        ap.TransportCapacity(),
        ap.Asymmetry(),
    )
    return {
        "bare": generate,
        "five analyzers": watched(*five),
        "IntrinsicTDO": watched(ap.IntrinsicTDO()),
        "without IntrinsicTDO": watched(
            ap.MeanRoutingSplit(bound=False),
            ap.SpectralEntropyBound(),
            ap.TransportCapacity(),
            ap.Asymmetry(),
        ),
        "score SAUQ": score,
        "naive": naive,
    }


TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters. "
)


def prompt_ids(model: Any, length: int) -> torch.Tensor:
    """A text of that many tokens, the opening of a novel again and again: its continuation does not end early."""
    ids = model.tokenizer(TEXT * (length // 40 + 1))["input_ids"][:length]
    return torch.tensor([ids])


def peak_memory(variant: str, prompt: int, new_tokens: int) -> float:
    """Peak resident memory in MB of a fresh process that runs one variant once."""
    code = (
        "import sys, torch; torch.set_num_threads(1); sys.path.insert(0, 'benchmarks')\n"
        "import attnprobe as ap, overhead\n"
        "model = ap.load_model()\n"
        f"ids = overhead.prompt_ids(model, {prompt})\n"
        f"run = overhead.variants(model, ids, {new_tokens})[{variant!r}]\n"
        "with torch.no_grad(): model.generate(ids[:, :8], max_new_tokens=1, verbose=False)\n"
        "overhead.forget_peak()\n"
        "with torch.no_grad(): run()\n"
        "print(overhead.peak_mb())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def forget_peak() -> None:
    """Start the peak of this process anew: loading a model takes more than running it (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mb() -> float:
    """Peak resident memory of this process in MB (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) / 1000


def main(
    prompt: Annotated[int, typer.Option(help="Prompt tokens.")] = 512,
    new_tokens: Annotated[int, typer.Option(help="New tokens.")] = 32,
    repeats: Annotated[int, typer.Option(help="Rounds; each runs every variant once.")] = 5,
    only: Annotated[list[str] | None, typer.Option(help="Variants to run beside the bare host.")] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    output: Annotated[str | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Time and memory of watching, beside the bare host in the same run."""
    torch.set_num_threads(1)
    model = ap.load_model()
    runs = variants(model, prompt_ids(model, prompt), new_tokens)
    if only:
        runs = {name: run for name, run in runs.items() if name == "bare" or name in only}
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        runs["bare"]()  # warm up
        for repeat in range(repeats):
            names = list(runs)
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                start = time.process_time()
                runs[name]()
                times[name].append(time.process_time() - start)
    figures: dict[str, dict[str, float]] = {}
    for name, seconds in times.items():
        ratios = [mine / bare for mine, bare in zip(seconds, times["bare"], strict=True)]
        figures[name] = {
            "seconds": statistics.median(seconds),
            "seconds_min": min(seconds),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
        if memory and platform.system() == "Linux":
            figures[name]["peak_mb"] = peak_memory(name, prompt, new_tokens)
    _print(figures, prompt, new_tokens)
    if output:
        with open(output, "w") as file:
            json.dump({"prompt": prompt, "new_tokens": new_tokens, "figures": figures}, file, indent=2)


def _print(figures: dict[str, dict[str, float]], prompt: int, new_tokens: int) -> None:
    table = Table(title=f"{prompt} + {new_tokens} tokens, one thread, torch {torch.__version__}")
    for column in ("variant", "seconds", "ratio to bare", "spread", "MB above bare"):
        table.add_column(column)
    for name, row in figures.items():
        above = f"{row['peak_mb'] - figures['bare']['peak_mb']:.0f}" if "peak_mb" in row else ""
        table.add_row(
            name,
            f"{row['seconds']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_min']:.3f} to {row['ratio_max']:.3f}",
            above,
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
