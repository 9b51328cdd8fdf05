"""What several tests of rewards use."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def alone() -> Iterator[Callable[[], float]]:
    """Returns a clock: seconds of the processor that this thread took, while nothing is collected.

    The heap of a process that ran thousands of tests takes seconds to collect, and other tests' threads may still run.
    """
    gc.collect()
    gc.disable()
    yield time.thread_time
    gc.enable()
