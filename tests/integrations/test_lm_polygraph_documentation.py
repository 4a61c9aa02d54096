"""The code of docs/lm_polygraph.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("lm_polygraph", reason='needs LM-Polygraph: pip install "attnprobe[lm-polygraph]"')

from integrations.polygraph_models import whitebox

import attnprobe as ap

PAGE = Path(__file__).parents[2] / "docs" / "lm_polygraph.md"


def test_the_page_runs(monkeypatch):
    """On a tiny model in place of the embedded one."""
    made = whitebox()
    plain = made.model
    plain.tokenizer = made.tokenizer
    plain.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    monkeypatch.setattr(ap, "load_model", lambda host: plain)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    namespace: dict = {"__name__": "page"}
    for block in blocks:
        exec(block, namespace)
    assert len(blocks) == 3
    assert {name for _, name in namespace["manager"].estimations} == {
        "AttnProbe_SAUQ",
        "AttnProbe_SAUQ-generation",
        "AttnProbe_LapEigValRAUQ",
        "AttnProbe_RAUQ(alpha=0.5)",
    }
    assert list(namespace["scores"][0].uncertainty) == ["SAUQ", "LexicalSimilarity_rougeL", "MonteCarloSequenceEntropy"]
