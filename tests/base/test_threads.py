"""Functions of users, called from an event loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest

from slimelite.base.guard import kept_alive
from slimelite.base.threads import LoopThread, call


class Waiting:
    def __await__(self) -> Iterator[None]:
        yield


async def waits() -> None:
    await Waiting()


def test_a_call_that_nobody_waits_for_any_more_ends_without_an_error() -> None:
    """As after Ctrl-C: the loop is closed, and then the coroutine."""
    coroutine = call(waits)
    coroutine.send(None)
    coroutine.close()


@pytest.mark.parametrize(("end", "named"), [(lambda: sys.exit(3), "sys.exit(3)"), (lambda: os._exit(3), "os._exit(3)")])
def test_a_loop_goes_on_and_says_which_call_would_have_ended_it(
    end: Callable[[], object], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def ends() -> None:
        with kept_alive():
            end()

    async def answers() -> str:
        return "here"

    thread = LoopThread("plugin")
    with pytest.raises(SystemExit):
        thread.run(ends())
    assert thread.run(answers()) == "here"
    thread.close()
    assert f"a plugin's own asyncio task called {named}" in caplog.text
