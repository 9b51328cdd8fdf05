"""Environments for tests, as a user writes them in a file."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from slimelite.environments.protocol import Row, Start, Step
from slimelite.environments.tools import ToolEnvironment


class Echo:
    """Says what it is told; special replies make it fail."""

    async def reset(self, row: Row) -> Start:
        self.row = row
        if row.metadata.get("never"):
            raise OSError("no room")
        return Start([*row.prompt, {"role": "user", "content": f"seed {row.seed}"}], row.metadata.get("tools", ()))

    def step(self, reply: Mapping[str, Any]) -> Step:
        said = reply["content"]
        if said == "raise":
            raise LookupError("no such thing")
        if said == "empty":
            next(iter(()))
        if said == "hang":
            time.sleep(60)
        if said == "die":
            os._exit(3)
        if said == "loud":
            print("x" * 100_000)
        if said == "much":
            return Step(reward="much", done=True)  # type: ignore[arg-type]
        if said == "text":
            return Step("text")  # type: ignore[arg-type]
        if said == "over":
            return Step(done="false")  # type: ignore[arg-type]
        if said == "whose":
            return Step(role=["b"])  # type: ignore[arg-type]
        if said == "wrong":
            return {"done": True}  # type: ignore[return-value]
        return Step([{"role": "user", "content": said}], {"a": 1.0, "b": 0.5}, done=said == "end", metrics={"n": 1})

    async def close(self) -> None:
        await asyncio.sleep(0)


class Winner:
    """Two players say a word each; the second one wins."""

    told: Sequence[dict[str, str]] = ({"role": "user", "content": "your turn"},)

    def reset(self, row: Row) -> Start:
        self.role = "first"
        return Start(row.prompt, role=self.role)

    def step(self, reply: Mapping[str, Any]) -> Step:
        if self.role == "second":
            return Step(reward=1.0, done=True)
        self.role = "second"
        return Step(self.told, role=self.role)


class Silent(Winner):
    """The second player is told nothing."""

    told = ()


class Weather(ToolEnvironment):
    """Two tools: one plain, one async."""

    def weather(self, town: str, days: int = 1) -> dict[str, Any]:
        """The weather in a town."""
        return {"town": town, "days": days}

    async def broken(self, where: list[str] | None) -> str:
        """Never works."""
        raise OSError(f"out of order {where}")

    def tools(self) -> list[Any]:
        """Both."""
        return [self.weather, self.broken]

    def score(self, content: str) -> float:
        """The length."""
        return float(len(content))


ASKED = {"role": "assistant", "content": ""}


def called(name: str, arguments: str, number: int = 0) -> dict[str, Any]:
    """A call as a reply has it."""
    return {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
