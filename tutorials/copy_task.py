# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # A controlled copy task: does a score see the one bit that was missed?
#
# A model is shown a string of bits and copies it. Either all bits are zero, or a single one hides among them. Nothing
# else differs, so whatever a score tells apart, it tells from that one bit; and the longer the string, the less of it
# there is. The task is that of the paper on the spectral geometry of attention (arXiv 2610.06012); the form of the
# prompt is ours.
#
# Run it as it is (`python tutorials/copy_task.py`, a few minutes on one core), or open it as a notebook with jupytext.
# The environment variable `COPY_TASK=small` makes it short; `COPY_TASK_PICTURE` names the file of the picture.

# %%
import os
import random

import pandas as pd
import torch

import attnprobe as ap

SMALL = os.environ.get("COPY_TASK") == "small"
LENGTHS = [4, 8] if SMALL else [4, 8, 16, 32, 64, 128]
PAIRS = 3 if SMALL else 20
METHODS = ["Perplexity", "MeanTokenEntropy", "RAUQ", "SAUQ"]
SEED = 0
PICTURE = os.environ.get("COPY_TASK_PICTURE", "copy_task.svg")

torch.set_num_threads(1)
model = ap.load_model(host="transformers")

# %% [markdown]
# ## The strings
#
# Two examples of eight random bits come first; they are what differs from pair to pair. Both prompts of a pair have the
# same examples. SmolLM2 reads every digit as a token of its own, so a string of n bits is n tokens.


# %%
def copy_prompt(examples: list[str], bits: str) -> str:
    """The prompt; the answer goes on after the colon."""
    shown = "".join(f"Bits: {example}\nCopy: {example}\n" for example in examples)
    return f"{shown}Bits: {bits}\nCopy:"


def pairs_of(length: int, count: int, seed: int) -> list[dict[str, str]]:
    """Pairs of prompts with the same examples: all zeros, and one hidden one at a random place."""
    chance = random.Random(f"{seed} {length}")
    pairs = []
    for _ in range(count):
        examples = ["".join(chance.choice("01") for _ in range(8)) for _ in range(2)]
        zeros, place = "0" * length, chance.randrange(length)
        hidden = zeros[:place] + "1" + zeros[place + 1 :]
        pairs.append({"zeros": zeros, "hidden": hidden, "plain": copy_prompt(examples, zeros)})
        pairs[-1]["needle"] = copy_prompt(examples, hidden)
    return pairs


print(pairs_of(16, 1, SEED)[0]["needle"])

# %% [markdown]
# ## Three answers
#
# Answers are given, not generated (`completions=`), so that every score reads the same tokens:
#
# - *right zeros*: all zeros, where all are zero;
# - *missed one*: the same answer, all zeros, where a one is hidden. It is wrong by one bit;
# - *copied one*: the right answer where a one is hidden.


# %%
def scored(length: int) -> pd.DataFrame:
    """Scores of the three answers to every pair of one length."""
    pairs = pairs_of(length, PAIRS, SEED)
    answers = {
        "right zeros": [(pair["plain"], pair["zeros"]) for pair in pairs],
        "missed one": [(pair["needle"], pair["zeros"]) for pair in pairs],
        "copied one": [(pair["needle"], pair["hidden"]) for pair in pairs],
    }
    rows = []
    for kind, given in answers.items():
        prompts, copies = [prompt for prompt, _ in given], [" " + copy for _, copy in given]
        for number, score in enumerate(ap.score(model, prompts, completions=copies, methods=METHODS)):
            rows.append({"length": length, "pair": number, "answer": kind, **score.uncertainty})
            rows[-1]["preferred"] = bool((score.tokens["probability"] > 0.5).all())
    return pd.DataFrame(rows)


scores = pd.concat([scored(length) for length in LENGTHS], ignore_index=True)

# %% [markdown]
# What would the model write by itself? An answer of whose tokens each has a probability above a half is the one that
# greedy decoding writes. The share of such answers:

# %%
preferred = scores.pivot_table(index="length", columns="answer", values="preferred", sort=False)
print(preferred.round(2).to_string())

# %% [markdown]
# ## Separation
#
# AUROC: how often a score is higher for the second answer than for the first, 0.5 being chance. *Missed one* against
# *right zeros* asks whether a score sees the error, the tokens of the answers being equal. *Copied one* against *right
# zeros* asks whether a score is raised by the bit alone, both answers being right.


# %%
def separation(length: int, second: str, method: str) -> dict[str, object]:
    """AUROC of the second answer against right zeros, with a 95 % interval over answers."""
    chosen = scores[(scores["length"] == length) & scores["answer"].isin(["right zeros", second])]
    found = ap.metrics.bootstrap(ap.metrics.auroc, chosen[method], chosen["answer"] == second, seed=SEED)
    return {"length": length, "answer": second, "method": method, "auroc": found.estimate} | {
        "low": found.low,
        "high": found.high,
    }


table = pd.DataFrame(
    [separation(n, kind, method) for kind in ("missed one", "copied one") for method in METHODS for n in LENGTHS]
)
print(table.pivot_table(index=["answer", "length"], columns="method", values="auroc")[METHODS].round(2).to_string())

# %% [markdown]
# ## The picture

# %%
try:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as text: a third of the size
    from matplotlib import pyplot as plt
except ImportError:
    print("For the picture: pip install matplotlib")
else:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, (kind, part) in zip(axes, table.groupby("answer", sort=False), strict=True):
        for method, line in part.groupby("method", sort=False):
            axis.plot(line["length"], line["auroc"], marker="o", label=method)
            axis.fill_between(line["length"], line["low"].astype(float), line["high"].astype(float), alpha=0.12)
        axis.axhline(0.5, color="grey", linewidth=0.8)
        axis.set(title=f"{kind} against right zeros", xlabel="bits", xscale="log", xticks=LENGTHS, ylim=(-0.03, 1.03))
        axis.set_xticklabels(LENGTHS)
        axis.minorticks_off()
    axes[0].set_ylabel("AUROC")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE)
    print(f"the picture is in {PICTURE}")
