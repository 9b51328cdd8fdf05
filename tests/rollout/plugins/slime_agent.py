"""An agent in the shape of slime's coding_agent_rl: a program that knows an address and a key, here two requests."""

from __future__ import annotations

from typing import Any

from slime.agent.adapters import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

from slimelite.base.http_client import Client, Refused


class State(metaclass=SingletonMeta):
    """The adapter of this process, and where it is served."""

    def __init__(self, args: Any) -> None:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        tokenizer = args.rollout_context.tokenizer
        self.adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url=url, tool_parser="qwen25", max_turns_per_sid=2)
        self.handle = run_app_in_thread(self.adapter.app, host="127.0.0.1", port=0)


def end() -> None:
    """Stop the server of `State`, and forget it: the next rollout of this process makes another one."""
    State(None).handle.stop()
    del SingletonMeta._made[State]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Ask twice, then once too often; a second branch by Anthropic's API."""
    made, url = State(args).adapter, f"http://127.0.0.1:{State(args).handle.port}"
    made.open_session(sample.session_id, sampling_defaults=sampling_params, max_context_tokens=200)
    key = {"Authorization": f"Bearer {sample.session_id}"}
    messages = [{"role": "user", "content": "2+3=?"}]
    async with Client() as client:
        first = await client.post(f"{url}/v1/chat/completions", {"model": "x", "messages": messages}, key)
        messages += [first["choices"][0]["message"], {"role": "user", "content": "4+5=?"}]
        await client.post(f"{url}/v1/messages", {"model": "x", "messages": messages[:1], "max_tokens": 3}, key)
        try:
            await client.post(f"{url}/v1/chat/completions", {"model": "x", "messages": messages}, key)
        except Refused as error:
            if error.status != 429:
                raise
    samples = await made.finish_session(sample.session_id, base_sample=sample, reward=0.5, extra_metadata={"rc": 0})
    assert await made.finish_session(sample.session_id, base_sample=sample) == []
    return samples
