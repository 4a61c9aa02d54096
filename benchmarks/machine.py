"""Where it was measured: processor, card, threads, and the versions of what ran."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("attnprobe", "torch", "transformers", "transformer-lens", "lm-polygraph", "numpy")


def facts() -> dict[str, Any]:
    """For the head of a table and the results file."""
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def free_bytes(device: str) -> int | None:
    """Memory that can still be had on a device; None where the system does not tell."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    known = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", known.read_text()) if known.exists() else None
    return None if found is None else int(found.group(1)) * 1024


def _processor() -> str:
    """The name of the processor where the system tells it."""
    known = Path("/proc/cpuinfo")
    if known.exists():
        for line in known.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
