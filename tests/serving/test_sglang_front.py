"""The front over a real SGLang server: streams, log-probs, alternatives, a JSON schema."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slimelite.engines.protocol import Codec
from slimelite.engines.sampling import engine_sampler
from slimelite.engines.sglang.client import SglangEngine
from slimelite.engines.sglang.server import ON_CPU, Server, SglangServer, server_command
from slimelite.serving.format import ChatFormat
from slimelite.serving.sessions import Sessions
from tests.conftest import sglang_variables
from tests.engines.tiny_models import log_probs
from tests.serving.chat import build, tokenizer
from tests.serving.fronts import Asking, front_over

pytestmark = pytest.mark.sglang
ASK = [{"role": "user", "content": "What is it?"}]


def test_an_sglang_server_behind_the_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(tmp_path / "model")
    for name, value in sglang_variables().items():
        monkeypatch.setenv(name, value)
    fields = {
        **ON_CPU,
        "grammar_backend": "xgrammar",
        "device": "cpu",
        "model_path": str(folder),
        "skip_server_warmup": True,
    }
    fields |= {"max_running_requests": 8, "max_total_tokens": 8192, "context_length": 2000}
    server = SglangServer(
        lambda host, port: server_command({**fields, "host": host, "port": port}), "127.0.0.1", tmp_path / "log"
    )
    server.start()
    try:
        asyncio.run(scenario(folder, server.url))
    finally:
        server.close()


async def scenario(folder: Path, url: str) -> None:
    chat_format = ChatFormat(tokenizer())
    ends = sorted(chat_format.end_ids)
    engine = SglangEngine(Server(url), str(folder), Codec(chat_format.decode, chat_format.encode, ends))
    try:
        async with front_over(Sessions(chat_format, engine_sampler(engine), 1990), engine) as ask:
            await check(ask, folder)
    finally:
        await engine.close()


async def check(ask: Asking, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    body = {"messages": ASK, "max_tokens": 40, "temperature": 0, "logprobs": True, "return_token_ids": True}
    status, whole = await ask("/v1/chat/completions", {**body, "top_logprobs": 2})
    assert status == 200, whole
    choice = whole["choices"][0]
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    expected = log_probs(model, choice["prompt_token_ids"], choice["token_ids"], 1.0)
    assert (torch.tensor(found) - expected).abs().max() < 1e-4
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in choice["logprobs"]["content"])
    chunks = await ask.stream("/v1/chat/completions", body)
    streamed = [part for chunk in chunks for part in chunk["choices"]]
    assert "".join(part["delta"].get("content", "") for part in streamed) == choice["message"]["content"]
    assert len([part for part in streamed if part.get("logprobs")]) > 3, "it came in few pieces"
    _, echoed = await ask(
        "/v1/completions", {"prompt": [10, 20, 30], "echo": True, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    )
    raw = log_probs(model, [10], [20, 30], 1.0).tolist()
    assert echoed["choices"][0]["logprobs"]["token_logprobs"][1:3] == pytest.approx(raw, abs=1e-4)
    schema = {"type": "object", "properties": {"right": {"type": "boolean"}}, "required": ["right"]}
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "verdict", "schema": {**schema, "additionalProperties": False}},
    }
    status, held = await ask("/v1/chat/completions", {"messages": ASK, "max_tokens": 300, "response_format": wanted})
    assert status == 200, held
    assert set(json.loads(held["choices"][0]["message"]["content"])) == {"right"}
    # SGLang's own notations: it reads GBNF, and what follows a trigger fits the structure's schema
    for grammar, fits in (
        ({"guided_regex": "(ab|c){2}[0-9]{1,3}"}, "(ab|c){2}[0-9]{1,3}"),
        ({"ebnf": 'root ::= "a" ("b" | "c")* "d"'}, "a[bc]*d"),
        ({"structured_outputs": {"choice": ["one.", "t(w)o"]}}, r"one\.|t\(w\)o"),
    ):
        status, held = await ask("/v1/chat/completions", {"messages": ASK, "max_tokens": 300, **grammar})
        assert status == 200, held
        assert re.fullmatch(fits, held["choices"][0]["message"]["content"]), held
    # a tag's grammar begins at its trigger, which the bias makes the model write wherever it may
    structure = {"begin": "x", "schema": wanted["json_schema"]["schema"], "end": "y"}
    tag = json.dumps({"type": "structural_tag", "structures": [structure], "triggers": ["x"]})
    params = {"structural_tag": tag, "max_new_tokens": 300, "logit_bias": {str(ord("x") - ord("!")): 50.0}}
    status, held = await ask("/generate", {"text": "abc", "sampling_params": params})
    assert status == 200, held
    assert re.match(r'x\s*\{\s*"right"\s*:\s*(true|false)\s*\}\s*y', held["text"]), held
