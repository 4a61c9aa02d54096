"""The code of docs/detection.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from detection.made import model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import attnprobe as ap

PAGE = Path(__file__).parents[2] / "docs" / "detection.md"


def test_the_page_runs(tmp_path, monkeypatch):
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    tokenizer = Tokenizer(models.WordLevel({"[unk]": 3, "Question": 4, "Answer": 5, "?": 6}, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny = model()
    monkeypatch.setattr(tiny, "tokenizer", PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    monkeypatch.setattr(ap, "load_model", lambda *, host: {"transformers": tiny}[host])
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "page"}
    exec(block, namespace)
    assert 0 <= namespace["probability"] <= 1
    assert namespace["features"].values.shape == (8, 12 * 4)
    assert namespace["detector"].evaluation.test == 4
    assert namespace["probability"] == pytest.approx(
        namespace["detector"].predict(tiny, "Question: Who painted Guernica?\nAnswer:", "Monet.")
    )
