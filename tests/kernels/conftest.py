"""One process with Triton's interpreter for all tests of the kernels."""

from collections.abc import Iterator

import pytest
from kernels.support import Interpreter


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreter]:
    """Calls a function in a process where Triton kernels are interpreted."""
    pytest.importorskip("triton")
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()
