"""slime.agent: a plugin in the shape of slime's coding agent runs unchanged, on our sessions."""

from __future__ import annotations

import importlib

import pytest

from slimelite.base.http_client import Refused, ask
from slimelite.engines.embedded import EmbeddedEngine
from slimelite.slime.agents import Adapter, parse_model_output, run_app_in_thread
from slimelite.slime.plugins import install_finder
from tests.rollout.conftest import MakeArgs, MakeManager
from tests.serving.chat import tokenizer


def test_an_agent_behind_slimes_adapter(
    make_args: MakeArgs, make_manager: MakeManager, http_engine: EmbeddedEngine
) -> None:
    install_finder()
    path = "tests.rollout.plugins.slime_agent"
    args = make_args(rollout_batch_size=2, n_samples_per_prompt=2, custom_generate_function_path=f"{path}.generate")
    try:
        output = make_manager(args, [http_engine]).generate(0)
    finally:
        importlib.import_module(path).end()
    table = output.table
    # two branches an episode: each question was one, and the third request was refused
    assert len(table) == 8
    assert len(set(table.rollout_id.tolist())) == 4
    assert set(table.reward.tolist()) == {0.5}
    assert table.loss_mask.all()
    assert (table.rollout_log_probs < 0).all()
    assert set(table.weight_versions.tolist()) == {0}
    assert {len(table.row_slice("response_tokens", row)) <= 3 for row in range(1, 8, 2)} == {True}


def test_an_agent_opens_and_ends_no_session() -> None:
    adapter = Adapter(tokenizer=tokenizer(), sglang_url="http://127.0.0.1:1")
    adapter.open_session("mine")
    handle = run_app_in_thread(adapter.app, host="127.0.0.1", port=0)
    url = f"http://:mine@127.0.0.1:{handle.port}"
    try:
        for method, path in (("POST", "/sessions"), ("DELETE", "/sessions/mine"), ("POST", "/abort_request")):
            with pytest.raises(Refused, match="this key is for an agent, which may only request replies"):
                ask(method, url + path, {"abort_all": True})
        assert adapter.sessions.find("mine").id == "mine"
    finally:
        handle.stop()


def test_replies_are_read_by_sglangs_names() -> None:
    text = '<think>so</think>ok <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    read = parse_model_output(text, tools_schema=None, tool_parser_name="qwen25", reasoning_parser_name="qwen3")
    assert (read.reasoning, read.text, read.tool_uses) == ("so", "ok", [{"name": "f", "input": {"a": 1}}])
    plain = parse_model_output(text, tools_schema=None, tool_parser_name=None, reasoning_parser_name=None)
    assert (plain.text, plain.tool_uses, plain.ill_formed) == (text, [], False)
    with pytest.raises(ImportError, match=r"does not provide slime\.agent\.sandbox; it provides .*slime\.agent\.a"):
        importlib.import_module("slime.agent.sandbox")
