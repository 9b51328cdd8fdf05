"""``slimelite chat`` as a user runs it, in a terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slimelite.apps.command import main
from slimelite.data.tokenizer import load_tokenizer
from tests.serving.chat import build
from tests.serving.scripted import Scripted, Server

COMMAND = [sys.executable, "-m", "slimelite.apps.command", "chat"]
SECONDS = 120


class Terminal:
    """The program in a terminal of its own: what it has written, and the keys that it gets."""

    def __init__(self, *words: str) -> None:
        ours, its = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            # a test run in the background ignores Ctrl-C, and so would its children
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(its)
        self._terminal, self.written = ours, ""
        self._decoder = getincrementaldecoder("utf-8")()  # a read may end within a character

    def until(self, text: str, again: str = "") -> str:
        """Wait for ``text``; returns what came before it, since the last wait.

        ``again``: keys that are pressed every few seconds: readline misses a signal that comes just before it waits.
        """
        deadline = time.monotonic() + SECONDS
        press = time.monotonic() + 5
        while text not in self.written:
            assert time.monotonic() < deadline, f"no {text!r} in {self.written!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                new = self._decoder.decode(os.read(self._terminal, 4096))
                self.written = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]|\r", "", self.written + new)
            elif again and time.monotonic() > press:
                self.type(again)
                press += 5
        before, _, self.written = self.written.partition(text)
        return before

    def type(self, keys: str) -> None:
        """Press keys; a control character is a signal to the program, as in a real terminal."""
        if keys == "\x03":
            self.process.send_signal(2)
        else:
            os.write(self._terminal, keys.encode())

    def close(self) -> None:
        """End the program."""
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@pytest.fixture
def served() -> Iterator[Server]:
    server = Server(Scripted(["one", "two", "three\nlines", "four", "five"]), None)
    yield server
    server.stop()


@pytest.fixture
def terminal(served: Server) -> Iterator[Terminal]:
    opened = Terminal(f"{served.url}/v1", "--system", "Be brief.", "--temperature", "0.5")
    opened.until("tiny; /help lists the commands, Ctrl-D ends the chat\n> ")
    yield opened
    opened.close()


def test_a_conversation_with_commands(served: Server, terminal: Terminal) -> None:
    engine = served.engine
    for typed, answer in (("Hi", "one"), ("And?", "two")):
        terminal.type(f"{typed}\n")
        assert terminal.until("\n> ").endswith(f"{typed}\n{answer}")
    assert engine.prompts[1].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    assert "assistant\none<|im_end|>" in engine.prompts[1]
    terminal.type("/regenerate\n")
    assert terminal.until("\n> ").endswith("three\nlines")
    assert engine.prompts[2] == engine.prompts[1]
    for command in ("/system", "/reset", "/temperature", "/max_tokens 2", "/seed 7"):
        terminal.type(f"{command}\n")
        terminal.until("> ")
    terminal.type("new \\\n")
    terminal.until("… ")
    terminal.type("line\n")
    terminal.until("fo")
    terminal.until("[cut off at max_tokens]\n> ")
    assert engine.prompts[3] == "<|im_start|>user\nnew \nline<|im_end|>\n<|im_start|>assistant\n"
    assert [r.params.temperature for r in engine.requests] == [0.5, 0.5, 0.5, 1.0]
    assert (engine.requests[3].params.max_new_tokens, engine.requests[3].params.seed) == (2, 7)
    for wrong, says in (("/temprature 1", "there is no command /temprature"), ("/seed x", "/seed takes a number")):
        terminal.type(f"{wrong}\n")
        assert f"slimelite chat: {says}" in terminal.until("\n> ")
    terminal.type("/settings\n")
    assert '"seed": 7' in terminal.until("\n> ")  # the wrong one has changed nothing
    terminal.type("\x04")
    assert terminal.process.wait(SECONDS) == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(served: Server, terminal: Terminal) -> None:
    engine = served.engine
    engine.allowed = 2
    terminal.type("Hi\n")
    terminal.until("on")
    terminal.type("\x03")
    terminal.until("[stopped]\n> ")
    engine.wait_for_cancel()
    assert (engine.cancelled, engine.said) == (1, 2)
    terminal.type("\x03")
    terminal.until("Ctrl-D or /quit ends the chat\n> ", again="\x03")
    engine.allowed = None
    terminal.type("And?\n")
    assert terminal.until("\n> ").endswith("two")
    assert "assistant\non<|im_end|>" in engine.prompts[1]
    served.stop()
    terminal.type("Again\n")
    said = terminal.until("\n> ")
    assert "slimelite chat: http://127.0.0.1:" in said
    assert "does not answer" in said
    assert "Traceback" not in said
    terminal.type("/quit\n")
    assert terminal.process.wait(SECONDS) == 0


def test_what_a_terminal_would_obey_is_not_written(served: Server, terminal: Terminal) -> None:
    served.engine.texts = ["\x1b]0;owned\x07é", "<think>\n\x1b]0;owned\x07hm\n</think>\n\nok"]
    terminal.type("Hi\n")
    assert terminal.until("\n> ").endswith("\ufffd]0;owned\ufffdé")
    terminal.type("Think\n")
    assert terminal.until("\n> ").endswith("\ufffd]0;owned\ufffdhm\nok")


def test_a_pipe_gets_the_answer_alone(tmp_path: Path) -> None:
    model = build(tmp_path / "model")
    words = [*COMMAND, str(model), "--max-tokens", "5", "--seed", "1"]
    done = subprocess.run(words, input="abc?\n", capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout
    assert done.stderr == "[cut off at max_tokens]\n"


def test_a_model_without_a_chat_template_goes_on_with_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(str(folder))
    assert not tokenizer.chat_template
    ids = torch.tensor([tokenizer("Once upon")["input_ids"]])
    model = AutoModelForCausalLM.from_pretrained(folder)
    whole = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    monkeypatch.setattr("sys.stdin", StringIO("Once upon"))
    assert main(["chat", str(folder), "--temperature", "0", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip("\n") == tokenizer.decode(whole, skip_special_tokens=True).strip("\n")


def test_mistakes_are_one_line(
    served: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_key = Server(Scripted(["x"]), "secret")
    for url, words, said in (
        ("http://127.0.0.1:1", [], "http://127.0.0.1:1/v1/models does not answer"),
        (with_key.url, [], "401: this request needs the server's API key"),
        (served.url, ["--max-tokens", "0"], "400: max_tokens: Input should be greater than or equal to 1"),
        (served.url, ["--base", "x"], "--base works only for a model that this process serves"),
        ("/no/such/model", [], "/no/such/model: no such folder"),
    ):
        monkeypatch.setattr("sys.stdin", StringIO("Hi"))
        assert main(["chat", url, *words]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("slimelite chat: ")
        assert captured.err.count("\n") == 1
        assert said in captured.err
    with_key.stop()
