"""Peak memory of a variant on a CPU: what one run adds to a fresh process, at its peak (Linux).

    python benchmarks/peak_memory.py '{"host": "transformers", "prompt": 64, "new_tokens": 8}' bare

prints megabytes. A process that has run something else keeps memory of it, so each figure takes a process of its own.
The model, and the libraries that the variant imports, are there before: the variant has run once on a few tokens.
Loading takes more than running, so the peak is started anew before the run.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

# glibc keeps what was freed and learns from sizes as it goes, so the same work peaks a hundred megabytes apart. With a
# fixed threshold every tensor beyond it is mapped by itself and given back when freed: the peak is memory in use.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
ROOT = Path(__file__).resolve().parent.parent


def peak_of_fresh_process(workload: object, variant: str) -> float | None:
    """What the run adds to resident memory at its peak, in MB; None where it cannot be had (not Linux)."""
    if platform.system() != "Linux":
        return None
    described = json.dumps(dataclasses.asdict(workload))  # type: ignore[call-overload] # a Workload, not imported here
    command = [sys.executable, str(Path(__file__).resolve()), described, variant]
    environment = {**os.environ, **ALLOCATOR}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"the process for the peak memory of {variant!r} failed: {_last_line(done.stderr)}")
    return float(done.stdout.split()[-1])


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "without a word"


def forget_peak() -> None:
    """Start the peak of this process anew."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_mb(what: str = "VmRSS") -> float:
    """Resident memory of this process in MB: now (VmRSS), or at its peak (VmHWM)."""
    found = re.search(what + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "this kernel does not tell the memory of a process"
    return int(found.group(1)) * 1024 / 1e6


def main() -> None:
    """Run one variant once, and print what that added at its peak."""
    import torch

    from benchmarks.variants import Subject, variants_of
    from benchmarks.workload import Workload, load, prompt_ids

    torch.set_num_threads(1)
    workload = Workload(**json.loads(sys.argv[1]))
    variant = next(variant for variant in variants_of(workload.host) if variant.name == sys.argv[2])
    model = load(workload)
    ids = prompt_ids(model, workload)
    run = variant.make(Subject(model, ids, workload))
    short = dataclasses.replace(workload, prompt=min(8, workload.prompt), new_tokens=2)
    with torch.no_grad():
        variant.make(Subject(model, ids[:, :8], short))()
        gc.collect()
        forget_peak()
        before = resident_mb()
        run()
    print(resident_mb("VmHWM") - before)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
