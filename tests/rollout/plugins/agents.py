"""An agent: it asks three times, and each time says what it was told before."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp

from slimelite.engines.protocol import SamplingParams
from slimelite.rollout.context import PluginArgs
from slimelite.samples.sample import Sample

TURNS = 3
# session id -> how often an agent began it; and how often one came to an end
begun: Counter[str] = Counter()
ended: Counter[str] = Counter()


async def talk(args: PluginArgs, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Samples of a conversation of `TURNS` turns."""
    sessions = args.rollout_context.sessions()
    limits = sampling_params["max_new_tokens"], sampling_params["temperature"], sampling_params["top_p"]
    defaults = SamplingParams(*limits)
    session = sessions.open(sample.session_id, defaults=defaults)
    begun[session.id] += 1
    messages = [{"role": "user", "content": "2+3=?"}]
    try:
        for _ in range(TURNS):
            turn = await session.chat(messages)
            messages += [turn.reply.message(), {"role": "user", "content": "3+4=?"}]
            await asyncio.sleep(0)
        return session.samples(sample)
    finally:
        ended[session.id] += 1
        sessions.close(session.id)


async def compact(args: PluginArgs, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Two branches, of which the second has the right answer."""
    sessions = args.rollout_context.sessions()
    session = sessions.open(sample.session_id, defaults=SamplingParams(sampling_params["max_new_tokens"]))
    for question in ("2+3=?", "in short: 2+3=?"):
        await session.chat([{"role": "user", "content": question}])
    sessions.close(session.id)
    first, last = session.samples(sample)
    first.response, last.response = "what?", f"\\boxed{{{sample.label}}}"
    return [first, last]


async def talk_over_http(args: PluginArgs, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """The same agent as a client of the run's front, which knows of no tokens."""
    context = args.rollout_context
    defaults = SamplingParams(sampling_params["max_new_tokens"], sampling_params["temperature"])
    session = context.sessions().open(sample.session_id, defaults=defaults)
    begun[session.id] += 1
    messages = [{"role": "user", "content": "2+3=?"}]
    url = f"{await context.front()}/sessions/{session.id}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {session.key}"}
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(None)) as http:
            for _ in range(TURNS):
                async with http.post(url, json={"model": "policy", "messages": messages}) as answer:
                    assert answer.status == 200, await answer.text()
                    said = (await answer.json())["choices"][0]["message"]
                messages += [said, {"role": "user", "content": "3+4=?"}]
        return session.samples(sample)
    finally:
        ended[session.id] += 1
        context.sessions().close(session.id)
