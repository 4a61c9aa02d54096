"""How far the sketched participation ratio is from the exact one, head by head on a real model, and what it costs.

    python benchmarks/sketch_error.py                             # README and docs as text, 1024 tokens, all 270 heads
    python benchmarks/sketch_error.py --tokens 2048 --rank 128 --rank 256 --seeds 10 --text FILE

For every rank: the share of heads within 4 % of the exact value and the median error, of the estimator and of the plain
one (the mean of squares of the deflated sketch, without what is known of its trace); how often one and two standard
errors cover the exact value; and seconds and bytes of all heads beside the exact method. Time is that of the processor
on one thread, of everything an analyzer does with the rows of the text and with the results. Heads of one seed share
their signs, so coverage is a mean over seeds and heads, not of independent trials.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import attnprobe as ap
from attnprobe.state import Sketch

WITHIN = 0.04
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class Method:
    """What one method costs over all heads."""

    update_seconds: float = 0.0
    compute_seconds: float = 0.0
    state_bytes: int = 0


@dataclass
class Rank(Method):
    """The errors of one rank: relative to the exact ratio, a list over heads for every seed."""

    rank: int = 0
    error: list[list[float]] = field(default_factory=list)
    plain_error: list[list[float]] = field(default_factory=list)
    standard_error: list[list[float]] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Figures over all heads and seeds."""
        error, plain, spread = (torch.tensor(x) for x in (self.error, self.plain_error, self.standard_error))
        return {
            "within": _share(error.abs() <= WITHIN),
            "within_worst_seed": (error.abs() <= WITHIN).double().mean(1).min().item(),
            "plain_within": _share(plain.abs() <= WITHIN),
            "median_error": error.abs().median().item(),
            "plain_median_error": plain.abs().median().item(),
            "largest_error": error.abs().max().item(),
            "median_standard_error": spread.median().item(),
            "covered_by_one": _share(error.abs() <= spread),
            "covered_by_two": _share(error.abs() <= 2 * spread),
        }


def _share(true: Tensor) -> float:
    return true.double().mean().item()


def text_ids(model: Any, text: Path | None, tokens: int) -> Tensor:
    """The first tokens of a file, or of the README and the docs."""
    files = [text] if text else [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    ids = model.tokenizer("\n\n".join(file.read_text() for file in files))["input_ids"]
    if len(ids) < tokens:
        raise typer.BadParameter(f"the text has {len(ids)} tokens and {tokens} were asked for: give a longer --text.")
    return torch.tensor([ids[:tokens]])


def each_pattern(model: Any, ids: Tensor, take: Callable[[Tensor], None]) -> None:
    """Show the pattern [1, head, query, key] of every layer, one after another: none is kept."""

    def show(pattern: Tensor, hook: Any) -> None:
        take(pattern.float())

    hooks = [(f"blocks.{layer}.attn.hook_pattern", show) for layer in range(model.cfg.n_layers)]
    with torch.inference_mode(), model.hooks(fwd_hooks=hooks):
        model(ids)


def stream(analyzer: ap.Analyzer, pattern: Tensor, cost: Method, block: int = 256) -> dict[str, Tensor]:
    """Feed a layer's rows as a probe feeds a prompt, add up the costs, and give the results."""
    rows = ap.Rows.from_pattern(pattern)
    start = time.process_time()
    for low in range(0, rows.n_query, block):
        analyzer.update(rows[low : min(low + block, rows.n_query)])
    read = time.process_time()
    found = analyzer.compute()
    cost.update_seconds += read - start
    cost.compute_seconds += time.process_time() - read
    return found


def plain_square(sketch: Sketch, mass: Tensor) -> Tensor:
    """1 + mean over a != b of (Pi (K - u u^T) Pi^T)_ab^2."""
    sums, sign_sum, _ = sketch.value
    centred = sums - sign_sum.unsqueeze(-1) * (mass / mass.sum(-1, keepdim=True)).unsqueeze(-2)
    weights = torch.where(mass > 0, 1 / mass, 0.0)
    product = (centred * weights.unsqueeze(-2)) @ centred.mT
    squares = product.square()
    rank = squares.shape[-1]
    return 1 + (squares.sum((-2, -1)) - squares.diagonal(dim1=-2, dim2=-1).sum(-1)) / (rank * (rank - 1))


def measure_layer(pattern: Tensor, exact: Method, ranks: list[Rank], seeds: int) -> None:
    """Add the heads of one layer to the figures."""
    tdo = ap.IntrinsicTDO(lambda2=False)
    stream(tdo, pattern, exact)
    exact.state_bytes += sum(block.nbytes for block in tdo._gram.matrix._blocks)
    rounded = pattern.double()
    truth = ap.functional.participation_ratio(rounded / rounded.sum(-1, keepdim=True)).flatten()
    for rank in ranks:
        for seed in range(seeds):
            analyzer = ap.IntrinsicTDO(method="sketch", rank=rank.rank, seed=seed)
            cost = rank if seed == 0 else Method()
            found = stream(analyzer, pattern, cost)
            ratio, error = (value.double().flatten() for value in found.values())
            columns = analyzer._columns
            trace = (columns.energy / columns.mass.clamp_min(1e-30)).sum(-1)
            square = plain_square(analyzer._sketch, columns.mass)
            plain = (trace.square() / (pattern.shape[-2] * square)).double().flatten()
            rank.error[seed] += (ratio / truth - 1).tolist()
            rank.plain_error[seed] += (plain / truth - 1).tolist()
            rank.standard_error[seed] += (error / truth).tolist()
            if seed == 0:
                rank.state_bytes += sum(block.nbytes for block in analyzer._sketch._blocks)


def main(
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text that are read.")] = 1024,
    rank: Annotated[
        list[int] | None, typer.Option(help="Ranks of the sketch; several are allowed. [64, 128, 256]")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the signs.")] = 5,
    text: Annotated[Path | None, typer.Option(exists=True, help="A text file; README and docs by default.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write every error and the figures as JSON.")] = None,
) -> None:
    """Errors, coverage of the standard error, time and memory of the sketched participation ratio."""
    torch.set_num_threads(1)
    model = ap.load_model()
    ids = text_ids(model, text, tokens)
    exact = Method()
    ranks = [
        Rank(rank=r, error=_lists(seeds), plain_error=_lists(seeds), standard_error=_lists(seeds))
        for r in rank or [64, 128, 256]
    ]
    each_pattern(model, ids, lambda pattern: measure_layer(pattern, exact, ranks, seeds))
    Console().print(table_of(exact, ranks, tokens, seeds))
    if output:
        summaries = [{**asdict(r), "summary": r.summary()} for r in ranks]
        results = {"tokens": tokens, "seeds": seeds, "exact": asdict(exact), "ranks": summaries}
        output.write_text(json.dumps(results, indent=2) + "\n")


def _lists(n: int) -> list[list[float]]:
    return [[] for _ in range(n)]


def table_of(exact: Method, ranks: list[Rank], tokens: int, seeds: int) -> Table:
    heads = len(ranks[0].error[0])
    title = f"{heads} heads, {tokens} tokens, {seeds} seeds, one thread, torch {torch.__version__}"
    table = Table(title=title, caption="plain: the deflated sketch without what is known of its trace")
    for column in (
        "method",
        f"heads within {WITHIN:.0%}",
        "worst seed",
        "plain",
        "median error",
        "plain",
        "largest",
        "1 s.e. covers",
        "2 s.e. cover",
        "s reading",
        "s at the end",
        "MB",
    ):
        table.add_column(column, justify="right")
    for one in ranks:
        figures = one.summary()
        table.add_row(
            f"rank {one.rank}",
            *(f"{figures[name]:.1%}" for name in ("within", "within_worst_seed", "plain_within")),
            *(f"{figures[name]:.2%}" for name in ("median_error", "plain_median_error", "largest_error")),
            *(f"{figures[name]:.1%}" for name in ("covered_by_one", "covered_by_two")),
            *_costs(one),
        )
    table.add_row("exact", *[""] * 8, *_costs(exact))
    return table


def _costs(method: Method) -> list[str]:
    return [f"{method.update_seconds:.2f}", f"{method.compute_seconds:.2f}", f"{method.state_bytes / 1e6:.0f}"]


if __name__ == "__main__":
    typer.run(main)
