"""The time a probe spends in its own calls, measured around them.

On a machine that others use, two runs of the same work differ by more than a probe costs. What the probe itself does is
a sum over its own calls in one run, so that the ratio total / (total - own) does not see how fast the rest happened to
be. What it leaves out: that the host's caches are colder after a call of ours.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import attnprobe as ap

# Everything that a host or a user calls on a probe while it watches.
_CALLS = (
    "attach",
    "detach",
    "on_call",
    "on_part",
    "on_attention",
    "on_logits",
    "on_call_end",
    "on_generate",
    "on_generate_end",
    "results",
)


@dataclass
class OwnTime:
    """Processor seconds inside the outermost calls of probes."""

    seconds: float = 0.0
    _inside: bool = False

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._inside, start = True, time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start
                self._inside = False

        return timed


@contextmanager
def own_time() -> Iterator[OwnTime]:
    """Measure the calls of every probe until the context is left."""
    own = OwnTime()
    with ExitStack() as stack:
        for name in _CALLS:
            stack.enter_context(mock.patch.object(ap.Probe, name, own.around(getattr(ap.Probe, name))))
        yield own
