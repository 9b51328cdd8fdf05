"""Functions of users, called from an event loop."""

from __future__ import annotations

from collections.abc import Iterator

from slimelite.base.threads import call


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
