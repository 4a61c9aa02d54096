"""Do heads of high participation ratio matter more for the loss than heads of low ratio and equal sink mass?

    python benchmarks/head_importance.py                                      # README and docs as texts
    python benchmarks/head_importance.py --data FILE.jsonl --field context --texts 4 --tokens 128 --output study.json

Every head of the embedded model is ablated by itself (`attnprobe.ablate`: zero, mean, sink), and the loss on a few
texts is compared with that of the whole model. The mean outputs come from as many other texts. Participation ratio and
sink score are those of the whole model on the same texts. Two answers for each way of ablating:

- Spearman correlation of the increase of the loss with the participation ratio, the sink score held fixed (ranks,
  linear), and with the layer held fixed as well (a constant a layer), with percentile intervals over resampled heads.
- Pairs of heads, one above and one below the median participation ratio, whose sink scores differ by at most the
  caliper; as many pairs as possible, at the least total difference. Median difference of the increases, the share of
  pairs in which the head of high ratio matters more, and a Wilcoxon signed-rank p-value. Once over all layers, once
  with partners at most --layers-apart layers from one another.

Only the layers from the ablated one on are computed again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pandas as pd
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy import optimize, stats
from torch import Tensor, nn

import attnprobe as ap

REPOSITORY = Path(__file__).resolve().parent.parent
MODES = ("zero", "mean", "sink")


@dataclass(frozen=True)
class Association:
    """A rank correlation over heads and its 95 % interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Pairs:
    """Heads of high and low ratio, matched by sink score: differences of the increases, in nats a token."""

    pairs: int
    median_difference: float
    low: float
    high: float
    high_matters_more: float
    p_value: float
    largest_sink_difference: float


# -- the loss under ablations -----------------------------------------------------------------------------------------


def losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean loss of each text [text], in nats a token."""
    each = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return each.double().mean(1)


@contextmanager
def from_layer(model: Any, layer: int) -> Iterator[None]:
    """The model without its first layers: its input embeddings are then what enters `layer`."""
    decoder, whole = model.model, model.model.layers
    decoder.layers = whole[layer:]
    try:
        yield
    finally:
        decoder.layers = whole


def entering(model: Any, ids: Tensor) -> list[Tensor]:
    """What enters each layer [text, token, d_model]."""
    return list(model(ids, use_cache=False, output_hidden_states=True).hidden_states[:-1])


def increases(model: Any, ids: Tensor, reference: Tensor, modes: tuple[str, ...]) -> pd.DataFrame:
    """The increase of the loss of every head under every mode: mean over texts and its standard error."""
    rows = []
    with torch.inference_mode():
        before = losses(model(ids, use_cache=False).logits, ids)
        entered = entering(model, ids)
        for layer in track(range(len(entered)), "ablating"):
            with from_layer(model, layer):
                for head in range(model.config.num_attention_heads):
                    for mode in modes:
                        given = {"reference": reference} if mode == "mean" else {}
                        with ap.ablate(model, [(layer, head)], mode=mode, **given):  # type: ignore[arg-type] # a name
                            after = losses(model(inputs_embeds=entered[layer], use_cache=False).logits, ids)
                        added = (after - before).numpy()
                        error = added.std(ddof=1) / len(added) ** 0.5 if len(added) > 1 else float("nan")
                        rows.append((layer, head, mode, added.mean(), error))
    return pd.DataFrame(rows, columns=["layer", "head", "mode", "increase", "standard_error"])


def diagnostics(model: Any, ids: Tensor) -> pd.DataFrame:
    """Participation ratio and sink score of every head: means over texts."""
    probe = ap.Probe([ap.IntrinsicTDO(lambda2=False), ap.SinkScore()])
    with torch.inference_mode(), probe.attach(model):
        model(ids, use_cache=False)
    found = probe.results()[["participation_ratio", "sink_score"]].mean("sequence").to_dataframe()
    return found.reset_index()[["layer", "head", "participation_ratio", "sink_score"]]


# -- the two answers --------------------------------------------------------------------------------------------------


def partial_spearman(x: Any, y: Any, held: Any = None, group: Any = None) -> float:
    """Correlation of the ranks of x and y after the ranks of `held` and a constant for each group are taken out."""
    columns = [np.ones(len(x))]
    if held is not None:
        columns.append(stats.rankdata(held))
    if group is not None:
        columns += [np.asarray(group) == one for one in np.unique(group)[1:]]
    fixed = np.stack(columns, 1).astype(float)
    left = [r - fixed @ np.linalg.lstsq(fixed, r, rcond=None)[0] for r in (stats.rankdata(x), stats.rankdata(y))]
    return float(np.corrcoef(*left)[0, 1])


def association(heads: pd.DataFrame, variable: str, held: str | None, by_layer: bool, seed: int) -> Association:
    """Partial Spearman correlation with the increase, with a percentile interval over resampled heads."""
    other = [heads[held]] if held else []

    def correlation(x: Any, y: Any, layer: Any, *held: Any) -> float:
        return partial_spearman(x, y, held[0] if held else None, layer if by_layer else None)

    found = ap.metrics.bootstrap(
        correlation, heads[variable], heads["increase"], heads["layer"], *other, resamples=2000, seed=seed
    )
    return Association(found.estimate, found.low, found.high)


def matched(heads: pd.DataFrame, caliper: float, layers_apart: int | None = None) -> list[tuple[int, int]]:
    """Rows (high, low) of matched heads: as many pairs as the limits allow, at the least total sink difference."""
    ratio = heads["participation_ratio"].to_numpy()
    high, low = np.flatnonzero(ratio > np.median(ratio)), np.flatnonzero(ratio <= np.median(ratio))
    sink, layer = heads["sink_score"].to_numpy(), heads["layer"].to_numpy()
    cost = np.abs(sink[high][:, None] - sink[low][None, :])
    allowed = cost <= caliper
    if layers_apart is not None:
        allowed &= np.abs(layer[high][:, None] - layer[low][None, :]) <= layers_apart
    forbidden = 1 + caliper * len(heads)  # dearer than all allowed pairs together
    rows, columns = optimize.linear_sum_assignment(np.where(allowed, cost, forbidden))
    return [(int(high[i]), int(low[j])) for i, j in zip(rows, columns, strict=True) if allowed[i, j]]


def compare_pairs(heads: pd.DataFrame, pairs: list[tuple[int, int]], seed: int) -> Pairs:
    """The increase of the loss of the head of high ratio less that of its partner."""
    high, low = (heads.iloc[list(side)] for side in zip(*pairs, strict=True))
    difference = high["increase"].to_numpy() - low["increase"].to_numpy()
    interval = ap.metrics.bootstrap(lambda d: float(np.median(d)), difference, resamples=2000, seed=seed)
    return Pairs(
        pairs=len(pairs),
        median_difference=interval.estimate,
        low=interval.low,
        high=interval.high,
        high_matters_more=float((difference > 0).mean()),
        p_value=float(stats.wilcoxon(difference).pvalue),
        largest_sink_difference=float(np.abs(high["sink_score"].to_numpy() - low["sink_score"].to_numpy()).max()),
    )


def answers(heads: pd.DataFrame, caliper: float, layers_apart: int, seed: int) -> dict[str, Any]:
    """Every figure for one way of ablating."""
    found: dict[str, Any] = {}
    for variable, other in (("participation_ratio", "sink_score"), ("sink_score", "participation_ratio")):
        for held, by_layer in ((None, False), (other, False), (other, True)):
            name = f"{variable}" + (f" | {held}" if held else "") + (" + layer" if by_layer else "")
            found[name] = asdict(association(heads, variable, held, by_layer, seed))
    for name, apart in (("pairs", None), ("pairs near", layers_apart)):
        pairs = matched(heads, caliper, apart)
        found[name] = asdict(compare_pairs(heads, pairs, seed)) if len(pairs) > 1 else None
    return found


# -- texts, tables ----------------------------------------------------------------------------------------------------


def texts_of(data: Path | None, field: str) -> list[str]:
    """The texts of a file, one a line, or README and docs."""
    if data is None:
        return [file.read_text() for file in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]]
    with data.open() as lines:
        return [str(json.loads(line)[field]) for line in lines if line.strip()]


def first_tokens(model: Any, texts: list[str], tokens: int, count: int) -> Tensor:
    """The first tokens [text, token] of the first texts that are long enough: `count` of them."""
    found = []
    for text in texts:
        ids = model.tokenizer(text)["input_ids"]
        if len(ids) >= tokens:
            found.append(ids[:tokens])
        if len(found) == count:
            return torch.tensor(found)
    raise typer.BadParameter(f"{len(found)} of {len(texts)} texts have {tokens} tokens and {count} are needed.")


def table_of(mode: str, found: dict[str, Any]) -> Table:
    table = Table(title=f"mode {mode}: increase of the loss")
    for column in ("what", "value", "95 % interval", "more"):
        table.add_column(column)
    for name, figures in found.items():
        if figures is None:
            table.add_row(name, "fewer than two pairs", "", "")
        elif "estimate" in figures:
            table.add_row(
                f"Spearman {name}",
                f"{figures['estimate']:+.3f}",
                f"{figures['low']:+.3f} to {figures['high']:+.3f}",
                "",
            )
        else:
            table.add_row(
                f"{name}: median high less low, 1e-3 nats",
                f"{1e3 * figures['median_difference']:+.3f}",
                f"{1e3 * figures['low']:+.3f} to {1e3 * figures['high']:+.3f}",
                f"{figures['pairs']} pairs, high more in {figures['high_matters_more']:.0%}, "
                f"p = {figures['p_value']:.2g}",
            )
    return table


def main(
    data: Annotated[Path | None, typer.Option(exists=True, help="JSON lines; README and docs by default.")] = None,
    field: Annotated[str, typer.Option(help="The field of the texts.")] = "context",
    texts: Annotated[int, typer.Option(min=1, help="Texts on which the loss is taken.")] = 4,
    tokens: Annotated[int, typer.Option(min=8, help="First tokens of each that are read.")] = 128,
    mode: Annotated[list[str] | None, typer.Option(help="zero, mean, sink; several are allowed. [all]")] = None,
    caliper: Annotated[float, typer.Option(min=0, help="Largest difference of sink scores in a pair.")] = 0.02,
    layers_apart: Annotated[int, typer.Option(min=0, help="Largest distance of layers in near pairs.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the resamples.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write every head and the figures as JSON.")] = None,
) -> None:
    """Importance of heads for the loss, by participation ratio and sink score."""
    torch.set_num_threads(1)
    model = ap.load_model(host="transformers")
    found = study(model, texts_of(data, field), texts, tokens, tuple(mode or MODES), caliper, layers_apart, seed)
    console = Console()
    console.print(f"loss {found['loss']:.3f} nats a token on {texts} texts of {tokens} tokens")
    for name, figures in found["answers"].items():
        console.print(table_of(name, figures))
    if output:
        output.write_text(json.dumps(found, indent=2) + "\n")


def study(
    model: Any,
    texts: list[str],
    count: int,
    tokens: int,
    modes: tuple[str, ...],
    caliper: float,
    layers_apart: int,
    seed: int,
) -> dict[str, Any]:
    """Ablate every head, and compare."""
    read = first_tokens(model, texts, tokens, 2 * count)
    ids, others = read[:count], read[count:]
    with torch.inference_mode():
        loss = float(losses(model(ids, use_cache=False).logits, ids).mean())
    heads = increases(model, ids, ap.head_means(model, others), modes).merge(diagnostics(model, ids))
    return {
        "settings": {"texts": count, "tokens": tokens, "caliper": caliper, "layers_apart": layers_apart, "seed": seed},
        "loss": loss,
        "answers": {one: answers(heads[heads["mode"] == one], caliper, layers_apart, seed) for one in modes},
        "heads": heads.to_dict("records"),
    }


if __name__ == "__main__":
    typer.run(main)
