"""Environments that other libraries bring: reasoning-gym, TextArena, MCP servers."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from slimelite.contrib import mcp, reasoning_gym, textarena
from slimelite.data.reader import read_rows
from slimelite.data.tokenizer import load_tokenizer
from slimelite.environments.hosts import EnvironmentFailure, Host
from slimelite.environments.protocol import Row, Start, Step
from slimelite.sandbox.registry import NO_WISHES, SandboxSettings

SUMS = "chain_sum,gcd?size=3&levels=2&prompt=none&min_value=2"


def episode(
    environment: str, row: Row, replies: Sequence[Any], sandbox: SandboxSettings = NO_WISHES
) -> tuple[Start, list[Step]]:
    """The start and the steps of an episode with these replies, as a run plays it."""

    async def play() -> tuple[Start, list[Step]]:
        host = Host(environment, call_seconds=60.0, seconds=120.0, sandbox=sandbox)
        try:
            live = await host.open()
            try:
                start = await live.reset(row)
                return start, [await live.step(said) for said in replies]
            finally:
                await live.close()
        finally:
            await host.close()

    return asyncio.run(play())


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def _needs_it(self) -> None:
        pytest.importorskip("reasoning_gym")

    def rows(self, spec: str) -> list[dict[str, Any]]:
        return [row for _, row in read_rows(f"environment:reasoning-gym:{spec}", ["input", "label"], None)]

    def test_rows_are_the_tasks_in_turn_at_each_level_and_repeat(self) -> None:
        rows = self.rows(SUMS)
        assert rows == self.rows(SUMS)
        places = [(row["metadata"]["task"], row["metadata"]["level"], row["metadata"]["index"]) for row in rows]
        assert places == [(task, level, i) for i in range(3) for level in range(2) for task in ("chain_sum", "gcd")]
        hard = [row["input"][0]["content"].count("+") + row["input"][0]["content"].count(" - ") for row in rows[2::4]]
        assert max(hard) >= 1

    def test_settings_are_truth_values_negative_numbers_and_lists_too(self) -> None:
        for false in ("false", "False", "0"):
            texts = [row["input"][0]["content"] for row in self.rows(f"chain_sum?prompt=none&allow_negation={false}")]
            assert not [text for text in texts if "-" in text.replace(" - ", "")]
        (row,) = self.rows('basic_arithmetic?size=1&prompt=none&min_terms=3&operators=["*"]&allow_parentheses=false')
        assert row["input"][0]["content"].count("*") >= 2
        (row,) = self.rows("products?size=1&prompt=none&min_digits=2&seed=-3")
        assert row["metadata"]["seed"] == -3

    def test_no_two_seeds_share_a_question(self) -> None:
        # the library makes entry i from seed + i, so that its own seeds 0 and 1 share all but one
        first, second = (
            {row["input"][0]["content"] for row in self.rows(f"gcd?size=40&prompt=none&seed={n}")} for n in (0, 1)
        )
        assert len(first & second) <= 2

    def test_the_library_scores_the_answer(self) -> None:
        row = self.rows("chain_sum?size=1")[0]
        given = Row(row["input"], row["label"], row["metadata"])
        assert row["input"][0]["role"] == "system"
        for text, reward in (("so <answer>{}</answer>", 1.0), ("{}", 0.0), ("<answer>{}0</answer>", 0.0)):
            start, steps = episode("reasoning-gym:chain_sum", given, [said(text.format(row["label"]))])
            assert list(start.messages) == row["input"]
            assert steps == [Step(reward=steps[0].reward, done=True, metrics={"unscored": 0.0})]
            assert (steps[0].reward == 1.0) == (reward == 1.0)

    def test_no_call_waits_for_the_import_of_the_library(self) -> None:
        """Its limit of time may be shorter; so a process that scores has imported it when there is a factory."""
        before = set(psutil.Process().children())
        environment = reasoning_gym.make("gcd")()
        (scorer,) = set(psutil.Process().children()) - before
        assert "slimelite.contrib.reasoning_gym" in scorer.cmdline()
        row = self.rows("gcd?size=1")[0]
        start = asyncio.run(environment.reset(Row(row["input"], row["label"], row["metadata"])))
        assert start.messages == row["input"]
        step = asyncio.run(environment.step(said(f"<answer>{row['label']}</answer>")))
        assert step.reward == 1.0
        assert set(psutil.Process().children()) - before == {scorer}, "the same process scores"

    def test_an_answer_that_is_a_program_reaches_nothing(self, tmp_path: Path) -> None:
        row = self.rows("n_queens?size=1")[0]  # the library evals such answers
        given, found = Row(row["input"], row["label"], row["metadata"]), []
        for code in (f"open({str(tmp_path / 'x')!r}, 'w')", "__import__('os')._exit(0)"):
            _, steps = episode("reasoning-gym:n_queens", given, [said(f"<answer>{code}</answer>")])
            found.append((steps[0].reward, steps[0].metrics["unscored"]))
        assert found == [(0.0, 0.0), (0.0, 1.0)]
        assert not (tmp_path / "x").exists()
        _, steps = episode("reasoning-gym:n_queens", given, [said(f"<answer>{row['label']}</answer>")])
        assert steps[0].reward == 1.0

    def test_the_script_makes_a_tokenizer_that_keeps_the_texts(self, tmp_path: Path) -> None:
        script = Path(__file__).parents[2] / "scripts" / "lib" / "reasoning_gym_data.py"
        spec = "spell_backward,gcd?size=20&prompt=none"
        subprocess.run([sys.executable, script, spec, "--out", tmp_path], check=True)
        tokenizer = load_tokenizer(str(tmp_path / "model"))
        rows = [row for _, row in read_rows(str(tmp_path / "sft.parquet"), ["messages"], None)]
        texts = [message["content"] for row in rows for message in row["messages"]]
        assert len(rows) == 40
        assert [tokenizer.decode(tokenizer(text)["input_ids"]) for text in texts] == texts
        assert max(len(tokenizer(text)["input_ids"]) for text in texts) < 40

    @pytest.mark.parametrize(
        ("spec", "problem"),
        [
            ("chain_sums", "no task chain_sums"),
            ("graph_color?size=1", "does not accept its own answer"),
            ("list_functions?size=1", "different questions from the same seed"),
            ("polynomial_multiplication?size=1", "different questions from the same seed"),
            ("chain_sum?size=many", "whole numbers"),
            ("chain_sum?size=-1", "whole numbers"),
            ("chain_sum?size=1&allow_negation=no", "of chain_sum must be a value such as False, not 'no'"),
            ("basic_arithmetic?size=1&operators=*", "of basic_arithmetic must be a value such as .*, not '\\*'"),
            ("chain_sum?size=1&colour=red", "has a setting colour"),
            ("chain_sum?size=1&min_terms=9&max_terms=2", "refuses the settings of chain_sum: max_terms"),
            ("gsm_symbolic?size=1&levels=2", "no curriculum for gsm_symbolic"),
        ],
    )
    def test_a_spec_that_cannot_be_used_is_named(self, spec: str, problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            list(reasoning_gym.rows(spec))


class TestTextArena:
    @pytest.fixture(autouse=True)
    def _needs_it(self) -> None:
        pytest.importorskip("textarena")

    def test_two_players_take_turns_and_see_each_others_moves(self) -> None:
        moves = [said(f"[{square}]") for square in (0, 4, 1, 5, 2)]
        start, steps = episode("textarena:TicTacToe-v0", Row([]), moves)
        assert start.role == "player 0"
        assert "You are Player 0" in start.messages[0]["content"]
        assert [step.role for step in steps[:4]] == ["player 1", "player 0", "player 1", "player 0"]
        assert "You are Player 1" in steps[0].messages[0]["content"]
        assert "[Player 1] [4]" in steps[1].messages[0]["content"]
        assert "You are Player 0" not in steps[1].messages[0]["content"]  # what was said is not said again
        assert "[Player 0]" not in steps[1].messages[0]["content"]
        assert (steps[4].reward, steps[4].rewards, steps[4].done) == (1.0, {"player 1": -1.0}, True)

    def test_a_seed_gives_one_game_whatever_else_draws_random_numbers(self) -> None:
        guesses = [said(f"[{n}]") for n in range(1, 9)]
        random.seed(1)
        before = random.getstate()
        games = [episode("textarena:Mastermind-v0", Row([], seed=3), [said("[1 2 3 4]"), said("[5 6 1 2]")])]
        assert random.getstate() == before
        random.seed(2)
        games += [
            episode("textarena:Mastermind-v0", Row([], seed=seed), [said("[1 2 3 4]"), said("[5 6 1 2]")])
            for seed in (3, 4)
        ]
        assert games[0] == games[1]
        assert games[0] != games[2]
        _, steps = episode("textarena:GuessTheNumber-v0", Row([], seed=3), guesses[:1])
        assert steps[0].role == ""

    @pytest.mark.parametrize(
        ("spec", "problem"),
        [
            ("TicTacToe", "known games are TicTacToe-v0"),
            ("TicTacToe-v0?players=3", "with 3 players"),
            ("TicTacToe-v0?player=2", "players=N"),
        ],
    )
    def test_a_spec_that_cannot_be_used_is_named(self, spec: str, problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            textarena.make(spec)


class TestMcp:
    COMMAND = f"mcp:{sys.executable} {Path(__file__).parent / 'tool_server.py'}"

    @pytest.fixture(autouse=True)
    def _needs_it(self) -> None:
        pytest.importorskip("mcp")

    def test_each_episode_has_a_server_of_its_own(self) -> None:
        row = Row([{"role": "user", "content": "count"}])
        for _ in range(2):
            replies = [calls("add", '{"number": 2}'), calls("add", '{"number": 3}'), calls("add", '{"n": 1}')]
            start, steps = episode(self.COMMAND, row, [*replies, calls("sub", "{}"), said("5")])
            assert [tool["function"]["name"] for tool in start.tools] == ["add", "crash", "look"]
            assert start.tools[0]["function"]["parameters"]["required"] == ["number"]
            assert [step.messages[0]["content"] for step in steps[:2]] == ["2", "5"]
            assert steps[2].messages[0]["content"].startswith("Error: ")
            assert "no tool sub" in steps[3].messages[0]["content"]
            assert (steps[4].done, steps[4].reward) == (True, None)  # the run's reward scores it

    def test_resources_are_shown_with_their_addresses(self) -> None:
        _, (step,) = episode(self.COMMAND, Row([{"role": "user", "content": "look"}]), [calls("look", "{}")])
        assert step.messages[0]["content"].split("\n") == [
            *("two files", "[plan](file:///plan.md)", "What comes next."),
            *("[resource](file:///notes.txt)", "seven", "(image)"),
        ]

    def test_a_server_that_dies_ends_the_episode(self) -> None:
        with pytest.raises(EnvironmentFailure, match="Connection closed"):
            episode(self.COMMAND, Row([{"role": "user", "content": "2+3=?"}]), [calls("crash", "{}")])

    def test_a_server_that_does_not_start_is_named(self) -> None:
        with pytest.raises(EnvironmentFailure, match="the MCP server does not answer"):
            episode(f"mcp:{sys.executable} -c 1", Row([]), [])
        with pytest.raises(ValueError, match="there is no program 'nosuch'"):
            mcp.make("nosuch --flag")
