"""Do attention heads tell a hallucinated answer from a right one? Features, splits and AUROC on labelled answers.

    python tutorials/detection.py halueval_qa.jsonl --folder features --detector detector.npz

A row of the JSONL file has `id`, `question`, `right_answer`, `hallucinated_answer`, and perhaps `context`. Features are
kept in the folder: a run that was ended goes on where it was, and another one reads nothing again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd

import attnprobe as ap
from attnprobe import detection, metrics

# Strata of answer length: five of them are so wide that length still tells inside.
BINS = 20


def labelled_answers(path: Path, rows: int | None = None, strip: bool = False) -> pd.DataFrame:
    """A row an answer: prompt, answer, label (1: hallucinated), question; `strip` takes full stops off the end."""
    listed = []
    for line in path.read_text(encoding="utf-8").splitlines()[:rows]:
        row = json.loads(line)
        context = f"Context: {row['context'].strip()}\n" if row.get("context") else ""
        prompt = f"{context}Question: {row['question'].strip()}\nAnswer:"
        for label, name in enumerate(("right_answer", "hallucinated_answer")):
            answer = row[name].strip().rstrip(".") if strip else row[name].strip()
            listed.append({"question": row["id"], "prompt": prompt, "answer": answer, "label": label})
    return pd.DataFrame(listed)


def shown(interval: metrics.Interval) -> str:
    return f"{interval.estimate:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def compare(features: detection.Features, answers: pd.DataFrame, seeds: int) -> pd.DataFrame:
    """A row a set of features: AUROC out of fold, at fixed length, and over held-out fifths by seed."""
    label, question, length = answers["label"].to_numpy(), answers["question"], features.answer_tokens
    rows = []
    for kind in (*features.settings.kinds, "all of them"):
        some = features.only(kind) if kind in detection.KINDS else features
        score = detection.out_of_fold(some, label, question, seed=0)
        fixed = metrics.length_controlled_auroc(score, label, length, bins=BINS)
        held_out = [detection.evaluate(some, label, question, seed=s).auroc.estimate for s in range(seeds)]
        rows.append(
            {
                "features": kind,
                "number": some.values.shape[1],
                "AUROC, 5 folds": shown(detection.grouped_auroc(score, label, question)),
                "at fixed length": f"{fixed.auroc:.3f}",
                f"held-out fifth, {seeds} seeds": f"{np.mean(held_out):.3f} +- {np.std(held_out, ddof=1):.3f}",
            }
        )
    for name, score in baselines(answers, length).items():
        fixed = metrics.length_controlled_auroc(score, label, length, bins=BINS)
        auroc = shown(detection.grouped_auroc(score, label, question))
        rows.append({"features": name, "number": 1, "AUROC, 5 folds": auroc, "at fixed length": f"{fixed.auroc:.3f}"})
    return pd.DataFrame(rows).fillna("")


def transferred(
    features: detection.Features, answers: pd.DataFrame, others: detection.Features, other: pd.DataFrame
) -> pd.DataFrame:
    """A row a set of features: AUROC on other answers, of detectors fitted on these."""
    label, question = other["label"].to_numpy(), other["question"]
    rows = []
    for kind in features.settings.kinds:
        detector = detection.Detector.fit(features.only(kind), answers["label"], test_share=0)
        elsewhere = detection.grouped_auroc(detector.probability(others.only(kind)), label, question)
        own = detection.grouped_auroc(detection.out_of_fold(others.only(kind), label, question), label, question)
        rows.append({"features": kind, "AUROC there": shown(elsewhere), "fitted there, 5 folds": shown(own)})
    alone = detection.grouped_auroc(others.answer_tokens, label, question)
    return pd.DataFrame([*rows, {"features": "tokens of the answer", "AUROC there": shown(alone)}]).fillna("")


def baselines(answers: pd.DataFrame, length: np.ndarray) -> dict[str, np.ndarray]:
    """What no model is needed for: a detector that does no better has learnt how answers are written."""
    full_stop = answers["answer"].str.rstrip().str.endswith(".").to_numpy(dtype=float)
    return {"tokens of the answer": length, "the answer ends with a full stop": full_stop}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("features"), help="where features are kept")
    parser.add_argument("--detector", type=Path, default=Path("detector.npz"), help="where the detector goes")
    parser.add_argument("--rows", type=int, help="so many questions, from the first on; all by default")
    parser.add_argument("--transfer", type=Path, help="other labelled answers, to apply the detectors to")
    parser.add_argument("--transfer-rows", type=int, default=40)
    parser.add_argument("--strip-full-stops", action="store_true", help="take full stops off the end of answers")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=10, help="splits into four fifths and one")
    given = parser.parse_args()

    answers = labelled_answers(given.data, given.rows, given.strip_full_stops)
    model = ap.load_model(host="transformers")
    settings = detection.FeatureSettings(list(detection.KINDS), k=16, max_tokens=given.max_tokens)
    features = detection.features_of(model, answers["prompt"], answers["answer"], settings, folder=given.folder)
    tokens = features.prompt_tokens + features.answer_tokens
    print(
        f"{len(features)} answers to {answers['question'].nunique()} questions, {np.median(tokens):.0f} tokens (median)"
    )
    print(f"{features.truncated} prompts cut to fit {given.max_tokens} tokens, {features.cut.sum()} tokens in all")
    print(compare(features, answers, given.seeds).to_string(index=False))

    if given.transfer is not None:
        other = labelled_answers(given.transfer, given.transfer_rows, given.strip_full_stops)
        others = detection.features_of(model, other["prompt"], other["answer"], settings, folder=given.folder)
        print(
            f"{given.transfer.stem}: {len(others)} answers, {others.truncated} prompts cut by {others.cut.sum()} tokens"
        )
        print(transferred(features, answers, others, other).to_string(index=False))

    detector = detection.Detector.fit(features.only("tdo"), answers["label"], groups=answers["question"])
    detector.save(given.detector)
    loaded = detection.Detector.load(given.detector)
    print(loaded)
    for _, row in answers.tail(2).iterrows():
        wrong = loaded.predict(model, row["prompt"], row["answer"])
        print(f"label {row['label']}: {wrong:.3f} wrong, says the detector of {row['answer']!r}")


if __name__ == "__main__":
    main()
