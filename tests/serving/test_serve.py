"""``slimelite serve`` as a user runs it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from slimelite.apps.command import main
from slimelite.apps.serve import add_model_flags, sampling_defaults, serving
from slimelite.engines.params import SamplingParams
from slimelite.serving.format import ChatFormat
from slimelite.serving.sessions import Sessions
from tests.serving.chat import build, tokenizer
from tests.serving.fronts import run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose run saved a model, and later an adapter of its base."""
    folder = tmp_path_factory.mktemp("run")
    build(folder / "base")
    build(folder / "hf_1")
    os.utime(folder / "hf_1" / "config.json", (0, 0))
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder / "hf_2")
    config = {"hf_checkpoint": str(folder / "base"), "save_hf": str(folder / "hf_{rollout_id}")}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_run_is_served_until_it_is_interrupted(run_folder: Path) -> None:
    command = [sys.executable, "-m", "slimelite.apps.command", "serve", str(run_folder), "--port", "0"]
    command += ["--api-key", "k y", "--context-length", "8193"]
    command += ["--drain-seconds", "0.2", "--access-log"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        said = server.stdout.readline()
        assert str(run_folder / "hf_2") in said, "the newest is an adapter, which is merged"
        assert "http://127.0.0.1:" in said
        # a client that has gone while the server writes to it raises SIGPIPE, which must not end the server
        ignored = re.search(r"SigIgn:\s*([0-9a-f]+)", Path(f"/proc/{server.pid}/status").read_text())
        assert ignored is not None
        assert int(ignored[1], 16) & (1 << (signal.SIGPIPE - 1))
        curl = shlex.split(server.stdout.readline())
        assert curl[0] == "curl"
        headers = dict(header.split(": ", 1) for flag, header in pairwise(curl) if flag == "-H")
        request = urllib.request.Request(curl[1], curl[-1].encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0
        long = {**json.loads(curl[-1]), "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with urllib.request.urlopen(urllib.request.Request(curl[1], json.dumps(long).encode(), headers)) as stream:
            assert b"chat.completion.chunk" in stream.readline()
            server.send_signal(signal.SIGTERM)
            last = json.loads(stream.read().strip().rpartition(b"data: ")[2])
        assert last["error"]["message"] == "the server is stopping: send the request again when the server is back"
    except BaseException:
        server.kill()
        raise
    said = server.communicate(timeout=120)[1]  # no second signal: it would end a server that is ending, with status -15
    assert "warning: --context-length 8193 is more than the model's 8192 tokens" in said
    assert '127.0.0.1 "POST /v1/chat/completions HTTP/1.1" 200' in said
    assert server.returncode == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nowhere/at/all"], "no such folder"),
        (["no/model"], "no/model: no such folder, and it is not in the cache of the Hugging Face hub"),
        (["{run}", "--host", "0.0.0.0"], "--api-key"),
        (["{run}", "--host", "192.0.2.1", "--api-key", "k"], "192.0.2.1"),
        (["{run}", "--api-key", ""], "--api-key is empty"),
        (["{run}", "--cors-origin", "*"], "--cors-origin * lets every web page use the model"),
        (["{run}", "--cors-origin", "a.org/"], "--cors-origin a.org/ is not an origin: write it as https://"),
        (["{run}", "--drain-seconds", "-1"], "--drain-seconds must be 0 or more, not -1"),
        (["{run}", "--port", "65536"], "--port must be a number from 0 to 65535, not 65536"),
        (["{run}", "--context-length", "0"], "--context-length must be at least 1, not 0"),
        pytest.param(
            ["{run}", "--device", "cuda"],
            "--device cuda: torch finds no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_served_is_one_line(
    run_folder: Path, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *(word.format(run=run_folder) for word in argv)]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("slimelite serve: ")]
    assert len(errors) == 1
    assert said in errors[0]


def test_a_hostile_chat_template_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ 'x' * 10 ** 10 }}")
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("slimelite serve: the chat template takes more than 512 MB to render a few words")


def test_an_engine_that_is_not_installed_is_one_line(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "sglang" else find(name, *rest)
    )
    assert main(["serve", str(run_folder), "--engine", "sglang"]) == 1
    said = "--engine sglang: sglang is not installed: see docs/install.md, or use --engine embedded"
    assert capsys.readouterr().err == f"slimelite serve: {said}\n"


def test_sampling_defaults_are_those_of_the_model_unless_they_are_turned_off(tmp_path: Path) -> None:
    """Of SmolLM2's kind of file; a greedy temperature shows that they reach the engine."""
    build(tmp_path)
    file = tmp_path / "generation_config.json"
    known = {
        "temperature": 0.2,
        "top_k": 0,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "max_new_tokens": 5,
        "min_p": None,
    }
    file.write_text(json.dumps(known))
    found = {"temperature": 0.2, "top_k": -1, "top_p": 0.9, "repetition_penalty": 1.1}
    assert sampling_defaults(str(tmp_path)) == found
    sessions = Sessions(ChatFormat(tokenizer()), None, 99, found)  # type: ignore[arg-type]
    for defaults in (sessions.anonymous().defaults, sessions.open().defaults):
        assert defaults == SamplingParams(99, **found)
    file.write_text('{"temperature": "hot"}')
    with pytest.raises(ValueError, match="temperature is 'hot', not a number: fix it, or give --sampling-defaults"):
        sampling_defaults(str(tmp_path))
    file.write_text('{"temperature": 0, "do_sample": true}')

    async def replies(*flags: str) -> list[str]:
        parser = argparse.ArgumentParser()
        add_model_flags(parser)
        args = parser.parse_args(["--context-length", "100", *flags])
        args.model, args.host, args.port, args.api_key, args.web = str(tmp_path), "127.0.0.1", 0, None, False
        async with serving(args) as server, aiohttp.ClientSession() as http:
            said = []
            for _ in range(2):
                async with http.post(f"{server.url}/v1/completions", json={"prompt": "abc"}) as answer:
                    said.append((await answer.json())["choices"][0]["text"])
            return said

    one, other = run(replies())
    assert one == other
    assert len({*run(replies("--sampling-defaults", "openai"))}) == 2
