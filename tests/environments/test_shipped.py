"""The environments that come along."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from slimelite.contrib.search import Index, Search
from slimelite.data.reader import read_rows
from slimelite.environments.calculator import Calculator, value_of
from slimelite.environments.hosts import load
from slimelite.environments.nim import PILES, Nim
from slimelite.environments.protocol import Row, Step
from slimelite.environments.tools import ToolEnvironment
from tests.environments.acted import ASKED, called


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2+3*4", 14), ("-(2-5)", 3), ("7/2", 3.5), ("7//2 % 2", 1), ("2**10", 1024), (" 1.5*2 ", 3)],
)
def test_the_calculator_knows_arithmetic(expression: str, value: float) -> None:
    assert value_of(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "x", "2**2**99", "9**9**9", "(1).real", "open('x')", "1" * 500, "1,2", "'a'*3"]
)
def test_the_calculator_knows_nothing_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"not|too large|at most"):
        value_of(expression)


def test_the_calculator_scores_its_own_rows() -> None:
    rows = [row for _, row in read_rows("environment:calculator@[5:8]")]
    assert rows == [row for _, row in read_rows("environment:calculator")][5:8]

    async def run() -> None:
        for row in rows:
            environment = Calculator()
            environment.reset(Row([{"role": "user", "content": row["input"]}], row["label"]))
            expression = row["input"].removesuffix("=?")
            step = await environment.step(
                {**ASKED, "tool_calls": [called("calculator", json.dumps({"expression": expression}))]}
            )
            assert [m["content"] for m in step.messages] == [row["label"]]
            end = Step([], 1.0, done=True, metrics={"rightful_calls": 1.0})
            assert await environment.step({**ASKED, "content": f"It is {row['label']}."}) == end
            assert (await environment.step({**ASKED, "content": f"It is {row['label']}1."})).reward == 0.0
            assert (await environment.step({**ASKED, "content": "9" * 400})).reward == 0.0
            environment.reset(Row([], row["label"]))
            guessed = await environment.step({**ASKED, "content": row["label"]})
            assert (guessed.reward, guessed.metrics) == (1.0, {"rightful_calls": 0.0})

    asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(sum(range(5)))", "10\n"),
        ("x = 1", "(no output; print what you want to see)"),
        ("print(1)\nboom()", "NameError: name 'boom' is not defined"),
        ("while True: pass", "Error: the code did not end within 1 s"),
        ("open('/etc/passwd').read()", "PermissionError"),
    ],
)
def test_the_python_tool_says_what_a_program_prints(code: str, said: str) -> None:
    async def run() -> str:
        # a second is too short for any program on a busy machine, and long for one that never ends
        environment = load("python:1" if "within 1 s" in said else "python:20")()
        assert isinstance(environment, ToolEnvironment)
        environment.reset(Row([]))
        step = await environment.step({**ASKED, "tool_calls": [called("python", json.dumps({"code": code}))]})
        return str(step.messages[0]["content"])

    assert said in asyncio.run(run())


def test_a_spec_that_makes_no_sense_is_said() -> None:
    with pytest.raises(ValueError, match="--environment calculator:hard: the calculator takes no spec"):
        load("calculator:hard")
    with pytest.raises(ValueError, match="python:5"):
        load("python:fast")
    with pytest.raises(ValueError, match="there are no passages"):
        load("search:/nowhere")
    with pytest.raises(ValueError, match="self, random, perfect"):
        load("nim:stupid")
    with pytest.raises(ValueError, match="did you mean calculator"):
        load("calculater")


def test_search_finds_passages_by_bm25(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The cat sat.\n\nThe dog ran, the dog barked.\n")
    rows = [{"title": "Fish", "text": "It swims with the dog."}, {"contents": "Nothing."}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    search = load(f"search:{tmp_path}")()
    assert isinstance(search, Search)
    assert search.search("dog").split("\n\n") == ["The dog ran, the dog barked.", "Fish: It swims with the dog."]
    assert search.search("a whale").startswith("Nothing was found")
    # by hand: N = 3, mean length 2; "b" is in 2 passages, f = 1 and 2
    index = Index(["a b", "b b a", "c"])
    assert index.best("b") == ["b b a", "a b"]
    found, scores = index._scores["b"]
    assert found.tolist() == [0, 1]
    assert scores.tolist() == pytest.approx(
        [0.470004 * 2.2 / (1 + 1.2), 0.470004 * 2 * 2.2 / (2 + 1.2 * 1.375)], rel=1e-5
    )


def test_nim_by_its_rules() -> None:
    def play(pile: int, *moves: str, opponent: str = "self", seed: int = 0) -> Step:
        game = Nim()
        start = game.reset(Row([], metadata={"pile": pile, "opponent": opponent}, seed=seed))
        assert list(start.messages) == [{"role": "user", "content": str(pile)}]
        step = Step()
        for move in moves:
            assert not step.done
            step = game.step({"content": move})
        return step

    first = play(7, "3")
    assert (first.role, list(first.messages)) == ("second", [{"role": "user", "content": "4"}])
    assert first.metrics == {"illegal_moves": 0.0, "winning_chances": 1.0, "winning_moves": 1.0}
    assert play(7, "3", "1").metrics == {"illegal_moves": 0.0}  # 4 cannot be won
    last = play(7, "3", "1", " 3\n")
    assert (last.done, last.reward, last.rewards) == (True, 1.0, {"second": -1.0})
    for wrong in ("4", "0", "three", "", "1 1", "-1", "1" * 5000):
        step = play(5, "3", wrong)
        assert (step.done, step.reward, step.rewards, step.metrics["illegal_moves"]) == (
            True,
            -1.0,
            {"first": 0.0},
            1.0,
        )
    # the opponent leaves a multiple of 4 if it can, and takes the last one
    assert list(play(6, "1", opponent="perfect").messages) == [{"role": "user", "content": "4"}]
    assert play(2, "1", opponent="random").reward == -1.0
    assert play(6, "1", opponent="perfect").role is None


def test_nim_brings_each_pile() -> None:
    rows = [row for _, row in read_rows(f"environment:nim:random@[:{len(PILES)}]")]
    assert [row["metadata"]["pile"] for row in rows] == list(PILES)
    assert {row["metadata"]["opponent"] for row in rows} == {"random"}
