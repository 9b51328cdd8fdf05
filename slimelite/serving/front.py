"""The HTTP front. The front serves every dialect, with and without sessions. The front uses one engine or all engines
of a run.

``POST /sessions`` opens a session, and returns its id and key. The endpoints that sample also exist under
``/sessions/<id>``. Replies under such a path are kept with their exact tokens until ``DELETE /sessions/<id>``; ``GET
/sessions/<id>`` returns them. The front's key gives access to everything. A session's key gives access only to the
session's sampling endpoints and to its record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from pydantic import Field

from slimelite.base.http_body import Body, Text, read_body
from slimelite.base.http_server import Answer, Handler, RequestError
from slimelite.base.prometheus import CONTENT_TYPE
from slimelite.engines.http_front import GenerateBody, GenerateServer, SampledBody, sampled
from slimelite.engines.protocol import GenerateRequest, GenerateResult, OnTokens
from slimelite.engines.sampling import Generating
from slimelite.serving import anthropic, openai, responses
from slimelite.serving.metrics import Counts
from slimelite.serving.replies import Model
from slimelite.serving.sessions import Session, Sessions, Turn

# the most requests that run or wait at the same time, and the most open sessions; further requests get status 429
MOST_REQUESTS = 4096
MOST_SESSIONS = 16384
# when a session is opened, all sessions that were not used for this time are closed [s]
IDLE_S = 24 * 3600.0
# the most characters of Markdown in one request to ``/render``; a malicious text with twice this length may take
# seconds
MOST_RENDERED = 50_000
# the endpoints that sample; each exists with and without a session
SAMPLING_ROUTES: dict[str, tuple[type[Body], Callable[[Model, Session, Any], Awaitable[Answer]]]] = {
    "/v1/chat/completions": (openai.ChatBody, openai.chat),
    "/v1/completions": (openai.CompletionBody, openai.complete),
    "/v1/responses": (responses.ResponsesBody, responses.respond),
    "/v1/messages": (anthropic.MessagesBody, anthropic.messages),
    "/v1/messages/count_tokens": (anthropic.CountBody, anthropic.count_tokens),
}
SESSION = r"/sessions/{session}"
# the columns of a turn in the record of a session
RECORD = ("number", "parent", "prompt_ids", "output_ids", "log_probs", "weight_versions", "finish_reason")


@sampled("openai", "responses", "anthropic")
class SessionBody(SampledBody):
    """The body of ``/sessions``: the default sampling parameters of a session, and its ``id``, which becomes a part of
    the path."""

    id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")
    metadata: dict[str, Any] = Field(default_factory=dict)


class RenderBody(Body):
    """The body of ``/render``: texts in Markdown."""

    texts: list[Text] = Field(max_length=16)


class Front(GenerateServer):
    """A server in the event loop of the code that starts the server. The sessions use the same event loop.

    Args:
        sessions: the open sessions. A request without a session gets a temporary session.
        name: the model's name in answers.
        key: the key that gives access to everything. None: requests that name no session need no key.
        page: HTML that is served at ``/`` without a key. With a page, ``/render`` converts Markdown to HTML.
    """

    def __init__(
        self,
        sessions: Sessions,
        engine: Generating,
        name: str,
        *,
        key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        page: str | None = None,
    ) -> None:
        chat_format = sessions.format
        super().__init__(engine, chat_format.encode_text, chat_format.decode, sessions.max_context_len, host, port, key)
        self._counts = Counts()
        self._sampler = self._counts.counted(self._sampler)
        sessions.sampler = self._counts.counted(sessions.sampler)
        self._model = Model(name, sessions, engine, int(time.time()))
        self._html, self._running, self._rendering = page, 0, asyncio.Semaphore(1)

    def _routes(self) -> list[web.RouteDef]:
        sampling = [web.post(place + path, self._sample) for place in ("", SESSION) for path in SAMPLING_ROUTES]
        models = [
            web.get(f"{place}/v1/models{name}", self._models) for place in ("", SESSION) for name in ("", "/{name:.+}")
        ]
        stored = [
            method(f"{place}/v1/responses/{{response}}", self._stored)
            for place in ("", SESSION)
            for method in (web.get, web.delete)
        ]
        sessions = [
            web.post(f"{SESSION}/generate", self._generate),
            web.post("/sessions", self._open),
            web.get(SESSION, self._record),
            web.delete(SESSION, self._close),
        ]
        page = [web.get("/", self._page), web.post("/render", self._render)] if self._html is not None else []
        metrics = web.get("/metrics", self._metrics)
        return [*super()._routes(), metrics, *sampling, *models, *stored, *sessions, *page]

    def _bodies(self) -> dict[str, type[Body]]:
        sampling = {path: kind for path, (kind, _) in SAMPLING_ROUTES.items()}
        return {**super()._bodies(), **sampling, "/sessions": SessionBody}

    async def _handled(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request like the base class, but limit the number of requests."""
        if self._running >= MOST_REQUESTS:
            raise RequestError(f"{MOST_REQUESTS} requests are running or waiting; try again later", 429)
        self._running += 1
        try:
            return await super()._handled(http, handler)
        finally:
            self._running -= 1

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request like the base class, but count each answer."""
        answer = await super()._guarded(request, handler)
        # a path without a route may be any text, so it is counted under ""
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else ""
        self._counts.requests[request.method if path else "", path, answer.status] += 1
        return answer

    def _described(self, http: web.Request, error: Exception, status: int) -> dict[str, object]:
        """The error body in the form of the dialect."""
        return (anthropic if "/v1/messages" in http.path else openai).error_body(error, status)

    def _last(self, http: web.Request, described: dict[str, Any], written: int) -> bytes:
        """The end of a stream after an error, in the form of the dialect."""
        if "/v1/responses" in http.path:
            return responses.failed(described["error"], written)
        return super()._last(http, described, written)

    def _public(self) -> list[Handler]:
        return [*super()._public(), self._page]

    def _opens(self, http: web.Request, key: str) -> bool:
        """Whether ``key`` permits the request. A request without a session needs the front's key. A request with a
        session needs the front's key or the session's key."""
        session = http.match_info.get("session")
        if self.key is not None and super()._opens(http, key):
            return True
        if session is None or (http.method == "DELETE" and "response" not in http.match_info):
            return self.key is None
        try:
            self._model.sessions.get(session, key)
        except (LookupError, PermissionError):
            # without a key, a client must not learn whether the session exists
            raise RequestError(
                f"this key does not give access to session {session!r}", 401, code="invalid_api_key"
            ) from None
        return True

    def _session(self, http: web.Request) -> Session:
        """The session that a request names, or a temporary session."""
        name, sessions = http.match_info.get("session"), self._model.sessions
        return sessions.anonymous() if name is None else sessions.find(name)

    async def _sample(self, http: web.Request) -> web.StreamResponse:
        session = self._session(http)
        path = http.path.removeprefix(f"/sessions/{http.match_info.get('session')}")
        kind, answered = SAMPLING_ROUTES[path]
        return await self._respond(http, await answered(self._model, session, await read_body(http, kind)))

    async def _stored(self, http: web.Request) -> web.Response:
        """Return a stored answer, or delete it."""
        name, owner = http.match_info["response"], http.match_info.get("session", "")
        answer = self._model.stored.record(owner, name).answer
        if http.method == "DELETE":
            self._model.stored.delete(owner, name)
            answer = {"id": name, "object": "response", "deleted": True}
        return web.json_response(answer)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        if "session" not in http.match_info:
            return await super()._generate(http)
        session = self._session(http)

        async def sample(request: GenerateRequest, on_tokens: OnTokens | None) -> GenerateResult:
            turn = await session.sample(session.raw_turn(request.input_ids), request.params, on_tokens)
            columns = turn.output_ids, turn.log_probs, turn.weight_versions
            ids = turn.kept, turn.constrained
            return GenerateResult(request.request_id, *columns, turn.finish_reason, turn.cached_tokens, *ids)  # type: ignore[arg-type]

        return await self._respond(http, await self._sampled(await read_body(http, GenerateBody), sample))

    async def _models(self, http: web.Request) -> web.Response:
        known = await openai.models(self._model)
        return web.json_response(known["data"][0] if "name" in http.match_info else known)

    async def _metrics(self, _: web.Request) -> web.Response:
        most = (await self._model.engine.info()).max_running_requests
        text = self._counts.text(self._running, len(self._model.sessions), most)
        return web.Response(text=text, headers={"Content-Type": CONTENT_TYPE})

    async def _open(self, http: web.Request) -> web.Response:
        """Open a session. Sampling parameters in the body become the defaults of the session."""
        body = await read_body(http, SessionBody) if http.can_read_body else SessionBody()
        self._model.sessions.forget(IDLE_S)
        if len(self._model.sessions) >= MOST_SESSIONS:
            raise RequestError(f"{MOST_SESSIONS} sessions are open; close some (DELETE /sessions/<id>)", 429)
        sessions = self._model.sessions
        session = sessions.open(body.id, defaults=body.params(sessions.defaults))
        return web.json_response({"id": session.id, "key": session.key, "path": f"/sessions/{session.id}"})

    async def _record(self, http: web.Request) -> web.Response:
        session = self._session(http)
        return web.json_response({"id": session.id, "turns": [_recorded(turn) for turn in session.turns]})

    async def _close(self, http: web.Request) -> web.Response:
        session = self._model.sessions.close(http.match_info["session"])
        return web.json_response({"id": session.id, "deleted": True})

    async def _page(self, _: web.Request) -> web.Response:
        # the page of another site must not embed this page, because it could mislead the user's clicks
        headers = {"X-Frame-Options": "DENY", "Content-Security-Policy": "frame-ancestors 'none'"}
        return web.Response(text=self._html, content_type="text/html", headers=headers)

    async def _render(self, http: web.Request) -> web.Response:
        """Convert Markdown to HTML. Only one such request runs at a time, so that the engine's thread gets most of the
        CPU time."""
        texts = (await read_body(http, RenderBody)).texts
        if sum(map(len, texts)) > MOST_RENDERED:
            raise RequestError(f"at most {MOST_RENDERED} characters can be rendered in one request", 413, param="texts")
        from slimelite.serving.markdown import to_html

        async with self._rendering:
            html = await asyncio.to_thread(lambda: [to_html(text) for text in texts])
        return web.json_response({"html": html})


def _recorded(turn: Turn) -> dict[str, object]:
    return {**{name: getattr(turn, name) for name in RECORD}, "message": turn.reply.message()}
