"""From examples to rows: one model, batch by batch.

Whatever an example does, the run goes on: a batch that raises is split until the row that is at fault is alone, and
that row is recorded with what was said. Only what no row can be blamed for (a device that has failed) ends a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnprobe.bench.store import Row
from attnprobe.embedded import quiet_transformers

if TYPE_CHECKING:
    from attnprobe.bench.config import RunConfig, TaskConfig
    from attnprobe.bench.example import Example

_LONGEST_ERROR = 1000


@dataclass(frozen=True)
class Batch:
    """Examples of one task that go through the model together.

    Attributes:
        task: place of the task in the configuration.
        examples: the examples; the longest first.
    """

    task: int
    examples: tuple[Example, ...]


def batches(task: int, examples: Sequence[Example], batch_size: int) -> list[Batch]:
    """All examples of a task, those of about the same length together, the longest first.

    Padding is then small, and a batch that does not fit into memory is met at the beginning. The batches depend on the
    examples alone, not on which of them are done, so that a run that was interrupted computes what it would have.
    """
    # Bytes of UTF-8 follow the number of tokens well enough, and need no tokenizer where there is no model.
    ordered = sorted(examples, key=lambda example: -len(example.prompt.encode("utf-8", "replace")))
    return [Batch(task, tuple(ordered[low : low + batch_size])) for low in range(0, len(ordered), batch_size)]


class Worker:
    """One copy of the model, and how it answers.

    Args:
        config: the run.

    Raises:
        ValueError, OSError, RuntimeError, ImportError: the model cannot be loaded, or a method or quality is not there.
    """

    def __init__(self, config: RunConfig) -> None:
        import attnprobe as ap
        from attnprobe.uncertainty.sampled import SampledMethod

        self.config = config
        # First what is quick to find out: a model may take minutes to load.
        self.methods = methods_of(config)
        sampled = [method for method in self.methods if isinstance(method, SampledMethod)]
        self._samples = bool(sampled)
        for method in sampled:
            method.prepare()  # now: an NLI model that cannot be had is no fault of a row
        self._quality: dict[str, Any] = {}
        for task in config.tasks:
            if task.quality not in self._quality:  # what measures may be a model too: one for all tasks
                self._quality[task.quality] = config.quality_of(task)
        with quiet_transformers():  # the run has bars of its own
            self.model = ap.load_model(config.model, host=config.host, dtype=config.dtype, device=config.device)
        self._too_large: dict[int, int] = {}

    def answer(self, batch: Batch) -> list[Row]:
        """A row for every example of the batch, in its order.

        Raises:
            RuntimeError: the device has failed, so that nothing can be computed any more.
        """
        if self._samples and len(batch.examples) > 1:
            # What is drawn for a prompt depends on the seed of the call: with one of its own, on nothing else.
            return self._in_pieces(batch, 1)
        # In another frame than the attempt, so that what did not fit is let go of before it is tried again.
        if not self._is_too_large(batch):
            started = time.perf_counter()
            scores, error, out_of_memory = self._attempt(batch)
            seconds = (time.perf_counter() - started) / len(batch.examples)
            if scores is not None:
                return [
                    self._row(batch, example, score, seconds)
                    for example, score in zip(batch.examples, scores, strict=True)
                ]
            if len(batch.examples) == 1:
                return [Row(self._task(batch).label, batch.examples[0].id, error=error, seconds=seconds)]
            if out_of_memory:
                self._note_too_large(batch)
            else:
                return self._in_pieces(batch, 1)
        return self._in_pieces(batch, (len(batch.examples) + 1) // 2)

    def _in_pieces(self, batch: Batch, size: int) -> list[Row]:
        pieces = (batch.examples[low : low + size] for low in range(0, len(batch.examples), size))
        return [row for piece in pieces for row in self.answer(Batch(batch.task, piece))]

    def _attempt(self, batch: Batch) -> tuple[list[Any] | None, str, bool]:
        """The scores; or None, what was said, and whether it was memory that did not suffice."""
        import attnprobe as ap

        task = self._task(batch)
        try:
            scores = ap.score(
                self.model,
                [example.prompt for example in batch.examples],
                methods=self.methods,
                max_new_tokens=task.max_new_tokens,
                stop=list(task.stop) or None,
                chat=self.config.chat if task.chat is None else task.chat,
                batch_size=self.config.batch_size,
                seed=_seed(self.config.seed, task.label, batch.examples[0].id),
            )
        except Exception as error:
            if _is_fatal(error):
                raise RuntimeError(f"the device has failed ({sentence(error)}): start again to go on.") from error
            memory = _is_out_of_memory(error)
            said = "there is not enough memory even for this row alone." if memory else sentence(error)
        else:
            return scores, "", False
        if memory:
            _empty_caches()
        return None, said, memory

    def _row(self, batch: Batch, example: Example, score: Any, seconds: float) -> Row:
        task = self._task(batch)
        quality, error = None, None
        nameless = [name for name, value in score.uncertainty.items() if math.isnan(value)]
        try:
            quality = self._quality[task.quality](example, score.text)
        except Exception as failure:
            error = sentence(failure)
        if nameless:
            error = f"{', '.join(nameless)} gave no number."
        return Row(
            task=task.label,
            id=example.id,
            prompt_tokens=len(score.prompt_ids),
            tokens=len(score.token_ids),
            text=score.text,
            finish=score.finish,
            quality=quality,
            error=error,
            seconds=seconds,
            scores=dict(score.uncertainty),
        )

    def _task(self, batch: Batch) -> TaskConfig:
        return self.config.tasks[batch.task]

    def _is_too_large(self, batch: Batch) -> bool:
        return len(batch.examples) > 1 and _size(batch) >= self._too_large.get(batch.task, _size(batch) + 1)

    def _note_too_large(self, batch: Batch) -> None:
        # Tried once: every other batch of this size is split before it fails too.
        self._too_large[batch.task] = min(_size(batch), self._too_large.get(batch.task, _size(batch)))


def local(config: RunConfig, todo: Iterable[Batch]) -> Iterator[list[Row]]:
    """The rows of every batch, one batch after the other, on one copy of the model in this process."""
    worker = Worker(config)
    for batch in todo:
        yield worker.answer(batch)


def methods_of(config: RunConfig) -> list[Any]:
    """The methods of a run as objects.

    Raises:
        ValueError: an unknown name or option.
    """
    return [method.build() for method in config.methods]


def sentence(error: BaseException) -> str:
    """What an error says, in one line; a fault rather than a message is named by its kind too."""
    said = " ".join(str(error).split())
    if not isinstance(error, ValueError | TypeError | OSError | RuntimeError | ImportError):
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    # The prompts of a call are numbered, and here there was one.
    said = said.replace("prompt 0 ", "the prompt ", 1) if said.startswith("prompt 0 ") else said
    said = said or type(error).__name__
    return said if len(said) <= _LONGEST_ERROR else said[: _LONGEST_ERROR - 3] + "..."


def _seed(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")


def _size(batch: Batch) -> int:
    return len(batch.examples) * max(len(example.prompt.encode("utf-8", "replace")) for example in batch.examples)


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    # torch says it of the CPU in a RuntimeError of no type of its own.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _is_fatal(error: Exception) -> bool:
    import torch

    if _is_out_of_memory(error):
        return False
    # After such an error every call to the device fails, and every row would seem to be at fault.
    failed = getattr(torch, "AcceleratorError", ())
    return isinstance(error, failed) or "CUDA error" in str(error)


def _empty_caches() -> None:
    import gc

    import torch

    gc.collect()
    with contextlib.suppress(RuntimeError):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
