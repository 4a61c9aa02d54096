"""Benchmarks of uncertainty scores: a configuration file, its tasks, and what counts as a good answer.

Needs the packages of `pip install "attnprobe[bench]"`; names are loaded on first use.

>>> from attnprobe import bench
>>> bench.Example("q1", "Who wrote Hamlet?", ("Shakespeare",)).references
('Shakespeare',)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# public name -> module that defines it
_EXPORTS = {
    "Example": "attnprobe.bench.example",
    "RunConfig": "attnprobe.bench.config",
    "TaskConfig": "attnprobe.bench.config",
    "load_config": "attnprobe.bench.config",
    "examples": "attnprobe.bench.tasks",
    "task_names": "attnprobe.bench.tasks",
    "quality_function": "attnprobe.bench.quality",
    "run": "attnprobe.bench.runner",
    "results": "attnprobe.bench.runner",
    "report": "attnprobe.bench.reporting",
}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from attnprobe.bench.config import RunConfig, TaskConfig, load_config
    from attnprobe.bench.example import Example
    from attnprobe.bench.quality import quality_function
    from attnprobe.bench.reporting import report
    from attnprobe.bench.runner import results, run
    from attnprobe.bench.tasks import examples, task_names


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'attnprobe.bench' has no attribute {name!r}; it offers {', '.join(_EXPORTS)}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
