"""The code of README.md and docs/heads.md runs, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")  # six answers are few, and the metrics say so
@pytest.mark.parametrize("page", ["README.md", "docs/heads.md"])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    found = blocks(page)
    assert found
    for number, code in enumerate(found):
        exec(compile(code, f"{page}, block {number}", "exec"), names)
