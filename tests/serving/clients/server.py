"""The server that official clients are tried against: a front whose model follows rules, and one with a tiny model.

``python -m tests.serving.clients.server COMMAND…`` runs the command twice with ``RULED_URL`` and ``TINY_URL`` in its
environment, and ends with its status. First the replies at ``RULED_URL`` come from the rules alone; then the embedded
engine samples them from the tiny model, held to the same texts by a grammar. ``--record FILE`` writes the requests that
the ruled front got, each with the form of its answer, for `tests/serving/test_recorded_clients.py`, and what the
command's last line says that it did: ``NAME VERSION: …``, perhaps with ``; not: …`` at its end for what did not work by
the client's fault.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from slimelite.engines.embedded.engine import EmbeddedEngine
from slimelite.engines.params import GRAMMARS
from slimelite.engines.protocol import EngineInfo, GenerateRequest, GenerateResult, OnTokens
from slimelite.engines.sampling import engine_sampler
from slimelite.serving.format import ChatFormat
from slimelite.serving.front import Front
from slimelite.serving.sessions import Sessions
from tests.serving.chat import build, spell, tokenizer
from tests.serving.clients.rules import reply
from tests.serving.fronts import Speaking, engine_front, event

KEY = "test-key"
# names whose values belong to the form of an answer
LITERAL = ("event", "finish_reason", "name", "object", "role", "stop_reason", "stop_sequence", "type")
# longer texts [characters] and lists of a request are cut in the record, and what belongs to a machine is left out
LONGEST, MOST, OWN = 80, 12, re.compile(r"[0-9a-f]{16,}|[0-9a-f]{8}-[0-9a-f-]{27}|/tmp/\w+")
# the most tokens of a conversation; a byte is one, and Claude Code begins with 80,000
CONTEXT = 1 << 19
# headers of requests that say something about the dialect
HEADERS = ("accept", "anthropic-version", "anthropic-beta", "authorization", "content-type", "x-api-key")


class Ruled(Speaking):
    """Says what its rules say, and takes schemas: what it says to them fits them."""

    async def info(self) -> EngineInfo:
        return replace(await super().info(), schemas=True)

    async def __call__(self, request: GenerateRequest, _: OnTokens | None) -> GenerateResult:
        said = reply(self.format.decode(request.input_ids), request.params.grammar)
        ids = spell(self.format, f"{said}<|im_end|>")[: request.params.max_new_tokens]
        reason = "stop" if ids[-1] in self.format.end_ids else "length"
        for stop in request.params.stop:
            ends = [n for n in range(1, len(ids) + 1) if stop in self.format.decode(ids[:n])]
            ids, reason = (ids[: ends[0]], "stop") if ends else (ids, reason)
        return GenerateResult(request.request_id, ids, [-0.5] * len(ids), [3] * len(ids), reason)


class Held:
    """The embedded engine over a tiny model, each of whose responses is held to what the rules say."""

    def __init__(self, folder: Path, chat_format: ChatFormat) -> None:
        codec = {"decode": chat_format.decode, "encode": chat_format.encode_text, "tokenizer": chat_format.tokenizer}
        self.engine, self.format = EmbeddedEngine(str(folder), max_running_requests=8, **codec), chat_format
        self.info, self.score, self.abort = self.engine.info, self.engine.score, self.engine.abort

    def held(self, request: GenerateRequest) -> GenerateRequest:
        """The request with a grammar that allows one text."""
        said = reply(self.format.decode(request.input_ids), request.params.grammar)
        free = replace(request.params, **dict.fromkeys(GRAMMARS), grammar_after="", begun="")
        # a text is written in Lark as in JSON
        return replace(request, params=replace(free, ebnf=f"start: {json.dumps(said)}"))

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        return await self.engine.generate([self.held(request) for request in requests])

    async def stream(self, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        return await self.engine.stream(self.held(request), on_tokens)


class RecordingFront(Front):
    """Keeps what it is asked."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.recorded: list[dict[str, Any]] = []

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body = await request.read()
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        asked = {"method": request.method, "path": request.path, "headers": headers}
        if "/sessions" not in request.path and request.method != "HEAD":  # the names of sessions differ
            self.recorded.append({**asked, "body": short(json.loads(body)) if body else None})
        return await super()._guarded(request, handler)


def ruled_front(key: str | None = KEY) -> RecordingFront:
    """A front over a ruled model that writes as Qwen2.5 does."""
    chat_format = ChatFormat(tokenizer("qwen2.5"))
    engine = Ruled(chat_format)
    return RecordingFront(Sessions(chat_format, engine_sampler(engine), CONTEXT), engine, "ruled", key=key)


@asynccontextmanager
async def held_front(folder: Path, key: str | None = KEY) -> AsyncIterator[RecordingFront]:
    """The same over the embedded engine, with a model that `build` saves to this folder."""
    chat_format = ChatFormat(tokenizer("qwen2.5"))
    engine = Held(build(folder, max_position_embeddings=CONTEXT), chat_format)
    try:
        yield RecordingFront(Sessions(chat_format, engine_sampler(engine), CONTEXT), engine, "ruled", key=key)
    finally:
        await engine.engine.close()


def short(value: Any, name: str = "") -> Any:
    """A body as it is recorded; ``name``: of the field that it is the value of."""
    if isinstance(value, dict):
        few = dict(list(value.items())[:2]) if name == "properties" else value
        return {key: short(one, key) for key, one in few.items()}
    if isinstance(value, list):
        return [short(one) for one in value[:MOST]]
    return OWN.sub("…", value[:LONGEST]) if isinstance(value, str) else value


def form(value: Any, key: str = "") -> Any:
    """The form of an answer: names and types, with the values of names that say what something is."""
    if isinstance(value, dict):
        return {name: form(one, name) for name, one in value.items()}
    if isinstance(value, list):
        forms = [form(one) for one in value]
        return [one for place, one in enumerate(forms) if one not in forms[:place]]
    return value if key in LITERAL else type(value).__name__


async def answered(
    http: aiohttp.ClientSession, url: str, request: dict[str, Any], ids: dict[str, str]
) -> dict[str, Any]:
    """Status and form of the answer to a recorded request, of a stream that of its events.

    ``ids``: kind -> the last id of an answer, which the request means where the record has "kind_…".
    """
    body = None if request["body"] is None else json.dumps(request["body"], ensure_ascii=False)
    for kind, own in ids.items():
        body = body and body.replace(f'"{kind}_…"', f'"{own}"')
    async with http.request(request["method"], url + request["path"], data=body, headers=request["headers"]) as answer:
        text, kind = await answer.text(), answer.content_type
    ids |= {kind: own for own, kind in re.findall(r'"id": "((msg|rs|fc|resp)_[0-9a-f]{32})"', text)}
    if kind == "application/json":
        return {"status": answer.status, "answer": form(json.loads(text))}
    assert kind == "text/event-stream"
    events = [event(block) for block in text.removesuffix("\n\n").split("\n\n")]
    return {"status": answer.status, "answer": form([{"event": name, "data": data} for name, data in events])}


def done(output: str) -> dict[str, str]:
    """What a client said that it did, from its output."""
    found = re.findall(r"^(.+?) (\d\S*): (.+?)(?:; not: (.+))?$", output, re.MULTILINE)
    client, version, does, fails = found[-1]
    today = datetime.date.today().isoformat()
    return {"client": client, "version": version, "date": today, "does": does, **({"not": fails} if fails else {})}


async def main(command: Sequence[str], record: Path | None) -> int:
    """Run the command beside the servers."""
    front = ruled_front()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ask, _ = await stack.enter_async_context(engine_front(build(folder / "model"), key=KEY))
        own = {"TINY_URL": ask.url, "TINY_MODEL": str(folder / "model"), "API_KEY": KEY}
        held = await stack.enter_async_context(held_front(folder / "held"))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        output, urls = "", []
        for one in (front, held):
            urls.append(await one.start())
            stack.push_async_callback(one.stop)
            env = {**os.environ, **own, "RULED_URL": urls[-1]}
            process = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
            output = (await process.communicate())[0].decode()
            print(output, end="")
            if status := await process.wait():
                print(f"failed on the {'embedded engine' if one is held else 'scripted model'}", file=sys.stderr)
                return status
        # the last output is that of the embedded engine
        print(f"the embedded engine answered {len(held.recorded)} requests, the scripted model {len(front.recorded)}")
        if record is not None:
            record.parent.mkdir(exist_ok=True)
            ids: dict[str, str] = {}
            asked = list(front.recorded)
            lines = [json.dumps({**one, **await answered(http, urls[0], one, ids)}) for one in asked]
            head = json.dumps({**done(output), "embedded": len(held.recorded)}, ensure_ascii=False).removesuffix("}")
            record.write_text(head + ', "requests": [\n' + ",\n".join(lines) + "\n]}\n")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    sys.exit(asyncio.run(main(given.command, given.record)))
