"""The same run on Ray Data: several copies of the model, on one machine or many.

Each worker holds one copy and answers whole batches, the same as in a single process. The driver alone writes: rows
are stored as they come back, so that resuming and reports know nothing of Ray.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attnprobe.bench.engine import Batch, Worker
from attnprobe.bench.store import Row

if TYPE_CHECKING:
    from attnprobe.bench.config import RunConfig

# What the commands say in one sentence; anything else is a fault, and keeps its traceback.
_PLAIN = (FileNotFoundError, ConnectionError, OSError, ImportError, TypeError, ValueError, RuntimeError)


class _Replica:
    """A worker as Ray Data wants it: a table in, a table out. Batches and rows travel as they are, pickled."""

    def __init__(self, config: RunConfig, path: Sequence[str]) -> None:
        # A quality of the user's own is imported here too, from where the driver would.
        sys.path += [folder for folder in path if folder not in sys.path]
        self._worker: Worker | None = None
        self._failed: Exception | None = None
        try:
            self._worker = Worker(config)
        except _PLAIN as error:
            self._failed = _plain(error)

    def __call__(self, table: dict[str, Any]) -> dict[str, list[bytes]]:
        return {"rows": [pickle.dumps(self._answer(pickle.loads(batch))) for batch in table["batch"]]}

    def _answer(self, batch: Batch) -> list[Row] | Exception:
        # An error goes back as a result: raised here, it would reach the driver in a coat of tracebacks.
        if self._worker is None:
            return self._failed or RuntimeError("a worker did not start.")
        try:
            return self._worker.answer(batch)
        except _PLAIN as error:
            return _plain(error)


def on_ray(config: RunConfig, todo: Sequence[Batch]) -> Iterator[list[Row]]:
    """The rows of every batch, in the order in which workers finish them.

    Uses the Ray that is running, or starts one on this machine. A worker that dies is started anew and its batch done
    again.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: Ray or a device has failed.
        ValueError, OSError, ...: what a worker says who cannot begin, as in a single process.
    """
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    # It tells of its plans, which nobody asked for; what goes wrong is an error.
    log = logging.getLogger("ray.data")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield from _stream(ray, config, todo)
    finally:
        log.setLevel(level)
        if started:
            ray.shutdown()


def _stream(ray: Any, config: RunConfig, todo: Sequence[Batch]) -> Iterator[list[Row]]:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # the run has its own
    context.print_on_execution_start = False
    gpus = _gpus_each(ray, config)
    if gpus:
        # Ray shows each worker its own device alone.
        config = config.model_copy(update={"device": "cuda"})
    # A block a batch: it comes back when it is done, and only it is done again when a worker dies.
    items = ray.data.from_items([{"batch": pickle.dumps(batch)} for batch in todo], override_num_blocks=len(todo))
    # Workers are started anew, and their batches done again, as often as it takes: that is Ray Data's default.
    answered = items.map_batches(
        _Replica,
        fn_constructor_args=(config, [*sys.path, os.getcwd()]),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(config.workers, len(todo))),
        num_cpus=1,
        num_gpus=gpus,
    )
    try:
        for table in answered.iter_batches(batch_size=None, prefetch_batches=0):
            for found in map(pickle.loads, table["rows"]):
                if isinstance(found, Exception):
                    raise found
                yield found
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"Ray has failed ({_last_line(error)}): start again to go on.") from error


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError('the engine "ray" needs Ray Data: pip install "attnprobe[ray]".') from error
    return ray


def _gpus_each(ray: Any, config: RunConfig) -> int:
    there = ray.cluster_resources().get("GPU", 0) > 0
    if config.device is None:
        return int(there)
    if config.device.startswith("cuda") and not there:
        raise RuntimeError(f"the device is to be {config.device} and Ray has no GPU: name another device.")
    return int(config.device.startswith("cuda"))


def _plain(error: Exception) -> Exception:
    """The same, of a kind that can be sent: an error of a library may need it to be unpickled."""
    kind = next(kind for kind in _PLAIN if isinstance(error, kind))
    return kind(" ".join(str(error).split()))


def _last_line(error: BaseException) -> str:
    # Ray quotes whole tracebacks, and what happened is at their end.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
