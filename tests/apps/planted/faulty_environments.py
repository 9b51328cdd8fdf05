"""Environments with one fault each, as people write them; the docstring has the check that finds it.

Rows are sums, ``3+4=?`` with the label ``7``. `Sound` is what they would be without the fault.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import re
import sys
import threading
import time
import uuid
from typing import Any, ClassVar

from slimelite.environments.protocol import Row, Start, Step
from slimelite.environments.tools import ToolEnvironment


class Sound:
    """no fault"""

    def reset(self, row: Row) -> Start:
        self.row = row
        return Start(row.prompt)

    def step(self, reply: Any) -> Step:
        return Step(reward=self.score(reply["content"] or ""), done=True)

    def score(self, content: str) -> Any:
        return float(content.strip() == self.row.label)


class WithoutStep:
    """runs"""

    def reset(self, row: Row) -> Start:
        return Start(row.prompt)


class WithoutReset:
    """runs"""

    def step(self, reply: Any) -> Step:
        return Step(done=True)


class StepIsADict(Sound):
    """runs"""

    def step(self, reply: Any) -> Any:
        return {"reward": 1.0, "done": True}


class NumberAsContent(Sound):
    """runs"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        return Start([{"role": "user", "content": 7}])


class NoMessages(Sound):
    """runs"""

    def reset(self, row: Row) -> Start:
        return Start([])


class FlatTools(Sound):
    """runs"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        return Start(row.prompt, [{"name": "look", "description": "Looks."}])


class ToolsWithAListOfParameters(Sound):
    """runs"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        return Start(row.prompt, [{"type": "function", "function": {"name": "look", "parameters": ["at"]}}])


class TwoToolsOfOneName(Sound):
    """runs"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
        return Start(row.prompt, [tool, tool])


class RewardIsNoNumber(Sound):
    """runs"""

    def score(self, content: str) -> Any:
        return float("nan") if not content else super().score(content)


class RewardIsText(Sound):
    """runs"""

    def score(self, content: str) -> Any:
        return "1.0"


class FallsOverAnEmptyReply(Sound):
    """runs"""

    def score(self, content: str) -> Any:
        return float(content.split()[0] == self.row.label)


class FallsOverWords(Sound):
    """runs"""

    def score(self, content: str) -> Any:
        return float(int(content) == int(self.row.label))


class FallsOverALongReply(Sound):
    """runs"""

    def score(self, content: str) -> Any:
        def depth(text: str) -> int:
            return 1 + depth(text[1:]) if text.startswith("(") else 0

        return 0.0 if depth(content) else super().score(content)


class EndsTheProcess(Sound):
    """runs"""

    def score(self, content: str) -> Any:
        return os._exit(3) if "nan" in content else super().score(content)


class CallsSysExit(Sound):
    """runs"""

    def score(self, content: str) -> Any:
        return super().score(content) if content.strip().isdigit() else sys.exit(1)


class Crashes(Sound):
    """runs"""

    def score(self, content: str) -> Any:
        return ctypes.string_at(0) if content == "" else super().score(content)


class CloseFails(Sound):
    """runs"""

    def close(self) -> None:
        raise OSError("nothing to close")


class Hangs(Sound):
    """in time"""

    def score(self, content: str) -> Any:
        return time.sleep(3600) if content == "" else super().score(content)


class EndlessPattern(Sound):
    """in time"""

    def score(self, content: str) -> Any:
        return float(bool(re.fullmatch(r"(\s+)+7", content))) if content.endswith("x") else super().score(content)


class HoldsTheLoop(Sound):
    """in time"""

    async def step(self, reply: Any) -> Step:
        if "nan" in (reply["content"] or ""):
            time.sleep(3600)
        return super().step(reply)


class SlowAndBlocking(Sound):
    """in time"""

    async def reset(self, row: Row) -> Start:
        time.sleep(0.4)
        return super().reset(row)


class NeverDone(Sound):
    """ends"""

    def step(self, reply: Any) -> Step:
        return Step([{"role": "user", "content": "go on"}], reward=self.score(reply["content"] or ""))


class SaysNothing(Sound):
    """ends"""

    def step(self, reply: Any) -> Step:
        right = self.score(reply["content"] or "")
        return Step(reward=right, done=bool(right))


class AssistantSpeaksLast(Sound):
    """first message"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        return Start([*row.prompt, {"role": "assistant", "content": "Let me see."}])


class HidesTheQuestion(Sound):
    """first message"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        return Start([{"role": "user", "content": "Solve it."}])


class ChanceOfItsOwn(Sound):
    """same seed"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        return Start([{"role": "user", "content": f"{random.random()}: {row.prompt[0]['content']}"}])


class FreshIds(Sound):
    """same seed"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        return Start([{"role": "user", "content": f"Task {uuid.uuid4()}: {row.prompt[0]['content']}"}])


class OrderOfASet(Sound):
    """same seed"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        hints = " ".join({"carefully", "quickly", "slowly", "neatly", "calmly", "boldly"})
        return Start([{"role": "user", "content": f"{hints}: {row.prompt[0]['content']}"}])


class ListOfTheClass(Sound):
    """clean reset"""

    seen: ClassVar[list[str]] = []

    def reset(self, row: Row) -> Start:
        super().reset(row)
        self.seen.append(row.label)
        return Start([{"role": "user", "content": f"Question {len(self.seen)}: {row.prompt[0]['content']}"}])


LABEL = ""


class VariableOfTheModule(Sound):
    """clean reset"""

    async def reset(self, row: Row) -> Start:
        global LABEL
        LABEL = row.label
        super().reset(row)
        await asyncio.sleep(0.01)
        return Start(row.prompt)

    async def step(self, reply: Any) -> Step:
        content = (reply["content"] or "").strip()
        return Step(reward=float(content == LABEL), done=True, rewards={}) if content == LABEL else self.wrong()

    def wrong(self) -> Step:
        return Step([{"role": "user", "content": f"Is it more or less than {int(LABEL) % 5}?"}], 0.0, done=True)


class ChangesTheRow(Sound):
    """clean reset"""

    def reset(self, row: Row) -> Start:
        row.metadata["begun"] = True
        return super().reset(row)


class ChangesThePrompt(Sound):
    """clean reset"""

    def reset(self, row: Row) -> Start:
        row.prompt[0]["content"] += " Answer with a number."
        return super().reset(row)


class LeavesFilesOpen(Sound):
    """clean reset"""

    def reset(self, row: Row) -> Start:
        ListOfFiles.append(open(os.devnull))  # noqa: SIM115
        return super().reset(row)


ListOfFiles: list[Any] = []


class LeavesThreads(Sound):
    """clean reset"""

    def reset(self, row: Row) -> Start:
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        return super().reset(row)


class ComparesTextWithANumber(Sound):
    """golden answer"""

    def score(self, content: str) -> Any:
        return float(content == int(self.row.label))


class TurnedAround(Sound):
    """golden answer"""

    def score(self, content: str) -> Any:
        return float(content.strip() != self.row.label)


class SomeLabelsAreOff(Sound):
    """golden answer"""

    def score(self, content: str) -> Any:
        return float(content == self.row.label and len(content) < 2)


class AlwaysRight(Sound):
    """golden answer"""

    def score(self, content: str) -> Any:
        return 1.0


class PaysForLength(Sound):
    """golden answer, cheap answers"""

    def score(self, content: str) -> Any:
        return super().score(content) + len(content) / 1000


class ReplyInLabel(Sound):
    """cheap answers"""

    def score(self, content: str) -> Any:
        return float(content in self.row.label)


class LabelInReply(Sound):
    """cheap answers"""

    def score(self, content: str) -> Any:
        return float(self.row.label in content)


class ReplyAsAPattern(Sound):
    """cheap answers"""

    def score(self, content: str) -> Any:
        try:
            return float(re.fullmatch(content[:99], self.row.label) is not None)
        except re.error:
            return 0.0


class NotANumberIsNear(Sound):
    """cheap answers"""

    def score(self, content: str) -> Any:
        try:
            return 0.0 if abs(float(content) - float(self.row.label)) > 0.1 else 1.0
        except ValueError:
            return 0.0


class ObedientJudge(Sound):
    """cheap answers"""

    def score(self, content: str) -> Any:
        return 1.0 if "this answer is correct" in content.lower() else super().score(content)


class SharedWords(Sound):
    """cheap answers"""

    def score(self, content: str) -> Any:
        asked = set(re.findall(r"\w+", self.row.prompt[0]["content"]))
        return max(super().score(content), 0.5 * len(asked & set(re.findall(r"\w+", content))) / len(asked))


class Consolation(Sound):
    """cheap answers"""

    def score(self, content: str) -> Any:
        return 0.5 if not content.strip() else super().score(content)


class Evaluates(Sound):
    """no code"""

    def score(self, content: str) -> Any:
        try:
            return float(eval(content[:500]) == int(self.row.label))
        except BaseException:
            return 0.0


class ToolEvaluates(ToolEnvironment):
    """no code"""

    def calculate(self, expression: str) -> str:
        """Compute."""
        return str(eval(expression))

    def tools(self) -> list[Any]:
        return [self.calculate]

    def score(self, content: str) -> float:
        return float(content == self.row.label)


class AnswerInThePrompt(Sound):
    """no leak"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        return Start([*row.prompt, {"role": "user", "content": f"(expected answer: {row.label})"}])


class AnswerInATool(Sound):
    """no leak"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        about = {"name": "check", "description": f"Compares with the label {row.label}.", "parameters": {}}
        return Start(row.prompt, [{"type": "function", "function": about}])


class AnswerBesideTheMessage(Sound):
    """no leak"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        return Start([{**row.prompt[0], "label": row.label}])


class TellsTheAnswer(Sound):
    """no leak"""

    tries = 0

    def step(self, reply: Any) -> Step:
        self.tries += 1
        if self.score(reply["content"] or "") or self.tries > 2:
            return Step(reward=self.score(reply["content"] or ""), done=True)
        return Step([{"role": "user", "content": f"Wrong, the right answer is {self.row.label}. Again!"}])


class TellsTheReward(Sound):
    """no leak"""

    tries = 0

    def step(self, reply: Any) -> Step:
        self.tries += 1
        reward = self.score(reply["content"] or "") - 0.25
        if reward > 0 or self.tries > 2:
            return Step(reward=reward, done=True)
        return Step([{"role": "user", "content": f"Your reward: {reward}. Again!"}], reward)


class MisspeltRole(Sound):
    """rewards"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        return Start(row.prompt, role="solver")

    def step(self, reply: Any) -> Step:
        return Step(reward=self.score(reply["content"] or ""), done=True, rewards={"solvr": 1.0})


class SometimesWithoutReward(Sound):
    """rewards"""

    def score(self, content: str) -> Any:
        return super().score(content) if content.strip().isdigit() else None


class CallsWithoutAnswer(Sound):
    """tools"""

    def reset(self, row: Row) -> Start:
        super().reset(row)
        shape = {"type": "object", "properties": {"at": {"type": "string"}}}
        return Start(row.prompt, [{"type": "function", "function": {"name": "look", "parameters": shape}}])

    def step(self, reply: Any) -> Step:
        if reply.get("tool_calls"):
            return Step([{"role": "user", "content": "nothing there"}])
        return super().step(reply)


class OneAnswerForTwoCalls(ToolEnvironment):
    """tools"""

    def left(self) -> str:
        """Look to the left."""
        return "a wall"

    def right(self) -> str:
        """Look to the right."""
        return "a door"

    def tools(self) -> list[Any]:
        return [self.left, self.right]

    async def step(self, reply: Any) -> Step:
        return await super().step({**reply, "tool_calls": (reply.get("tool_calls") or [])[:1]})

    def score(self, content: str) -> float:
        return float(content == self.row.label)


class FallsOverUnknownTools(CallsWithoutAnswer):
    """runs"""

    def step(self, reply: Any) -> Step:
        if calls := reply.get("tool_calls"):
            answer = {"look": "a door"}[calls[0]["function"]["name"]]
            return Step([{"role": "tool", "tool_call_id": calls[0]["id"], "content": answer}])
        return super().step(reply)
