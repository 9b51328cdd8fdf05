"""slime's ``slime.agent``: adapters through which a program talks to the model. The adapters use our HTTP front and
sessions.

In slime, an adapter is a web application of the plugin, and a client's API key is the name of its session. Here, a
conversation continues from the sampled tokens. The text of a reply is never tokenized again, so the tokens never drift
from the sampled ones, and slime's settings against such a drift have no effect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from aiohttp import web
from aiohttp.web_log import AccessLogger

from slimelite.base.http_client import Client
from slimelite.base.http_server import RequestError, request_key
from slimelite.base.threads import LoopThread
from slimelite.engines.http_front import parse_sampling_params
from slimelite.engines.protocol import EngineInfo, GenerateRequest, GenerateResult, OnTokens, Scores
from slimelite.engines.sglang.wire import extend, request_body
from slimelite.samples.sample import Sample
from slimelite.serving.format import ChatFormat, Tools, schemas
from slimelite.serving.front import SAMPLING_ROUTES, Front
from slimelite.serving.sessions import Session, Sessions
from slimelite.serving.tools import REASONING_FORMATS, TOOL_FORMATS, read_reasoning, read_tools

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# longest conversation of a session without a limit [tokens]; the engine refuses conversations that are too long for it
LONGEST = 1 << 20
FilteredAccessLogger = AccessLogger


class Adapter:
    """slime's ``OpenAIAdapter`` and ``AnthropicAdapter`` in one class. It keeps sessions by name, and answers requests
    of OpenAI's and Anthropic's APIs.

    ``app``: the web application, for `run_app_in_thread` or a plugin's own server.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,  # noqa: ARG002
    ) -> None:
        """``sglang_url``: an address with SGLang's ``/generate``. ``tool_parser``, ``reasoning_parser``: our name or
        SGLang's name of a format. With None or another name, the chat template decides. ``max_turns_per_sid``: the
        maximum number of replies in one session.
        """
        tools, thinking = _known(TOOL_FORMATS, tool_parser), _known(REASONING_FORMATS, reasoning_parser)
        chat_format = ChatFormat(tokenizer, tool_parser=tools, reasoning_parser=thinking)
        engine = self._engine = _Server(sglang_url.rstrip("/"))
        self.sessions = Sessions(chat_format, engine.sample, LONGEST)
        self.app = _ByKey(self.sessions, engine, "slime-actor", max_turns_per_sid).application()

    def open_session(
        self, sid: str, *, sampling_defaults: Mapping[str, Any] | None = None, max_context_tokens: int = 0
    ) -> None:
        """Open a session. ``sampling_defaults`` use SGLang's names.

        If the run trains on the ids that sampling kept, a session that a generate function opens stores these ids with
        each token.

        Raises:
            ValueError: the name is taken, or a parameter is not supported.
        """
        from slimelite.rollout.pool import TELLS

        session = self.sessions.open(sid, defaults=parse_sampling_params(dict(sampling_defaults or {})))
        if TELLS.get():
            self._engine.telling.add(sid)
        session.max_context_len = max_context_tokens or LONGEST

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample | None = None,
        reward: float = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample]:
        """Close the session, and return one sample for each of its branches. Each sample has ``reward``. A second call
        returns no samples.

        Running requests have ``wait_timeout`` seconds to finish.
        """
        session = await self._closed(sid, wait_timeout)
        if session is None or base_sample is None or not session.turns:
            return []
        samples = session.samples(base_sample)
        for sample in samples:
            sample.reward = reward
            sample.metadata |= extra_metadata or {}
        return samples

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Close the session and forget it."""
        await self._closed(sid, wait_timeout)

    shutdown_session = drop_session

    async def _closed(self, sid: str, wait_timeout: float) -> Session | None:
        self._engine.telling.discard(sid)
        try:
            session = self.sessions.close(sid)
        except LookupError:
            return None
        end = asyncio.get_running_loop().time() + wait_timeout
        while session.running and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        return session


class SingletonMeta(type):
    """The metaclass of classes with one object in each process. The first call of a class creates its object, and later
    calls return the same object."""

    _made: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the object, or return the existing one."""
        if cls not in SingletonMeta._made:
            SingletonMeta._made[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._made[cls]


def _known(formats: Mapping[str, Any], name: str | None) -> str | None:
    """Our name of the format that we or SGLang call ``name``; None if there is no such format."""
    return next((f.name for f in formats.values() if name == f.name or name in f.sglang), None)


class _ByKey(Front):
    """A front whose clients name their session only by the API key."""

    def __init__(self, sessions: Sessions, engine: _Server, name: str, most_turns: int | None) -> None:
        super().__init__(sessions, engine, name)
        self._most_turns = most_turns

    def _opens(self, http: web.Request, key: str) -> bool:  # noqa: ARG002
        """Always True, because `_session` checks the key. It refuses every request without a session."""
        if http.path not in SAMPLING_ROUTES and http.method != "GET":
            raise RequestError("this key is for an agent, which may only request replies", 401, code="invalid_api_key")
        return True

    def _session(self, http: web.Request) -> Session:
        session_id = request_key(http)
        session = self._model.sessions.find(session_id)
        if self._most_turns is not None and len(session.turns) >= self._most_turns:
            raise RequestError(
                f"session {session_id!r} has reached its limit of {self._most_turns} turns (max_turns_per_sid)", 429
            )
        return session


class _Server:
    """Engines behind one address, such as SGLang's router.

    ``telling``: names of the sessions whose tokens come with the ids that each was drawn from.
    """

    def __init__(self, url: str) -> None:
        self._url, self._client = url, Client()
        self.telling: set[str] = set()

    async def sample(self, request: GenerateRequest, _: OnTokens | None) -> GenerateResult:
        """See `Sampler`."""
        (result,) = await self.generate([request])
        return result

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """See `Engine.generate`."""
        return list(await asyncio.gather(*(self._one(request) for request in requests)))

    async def _one(self, request: GenerateRequest) -> GenerateResult:
        result = GenerateResult(request.request_id)
        if request.prefix_key in self.telling:
            request = replace(request, params=request.params.telling())
        body = request_body(request, result, request.request_id, eos=(), seeds=True)
        extend(result, await self._client.post(f"{self._url}/generate", body), request.params)
        return result

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        return EngineInfo("server", -1, LONGEST, 1, seeds=False)

    async def score(self, input_ids: Sequence[int], start: int, temperature: float = 1.0, top: int = 0) -> Scores:  # noqa: ARG002
        """See `Engine.score`."""
        raise ValueError("this address does not give log-probs of a prompt: send the request to the engine itself")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`. Without ids, nothing is aborted, because other sessions use the same engines."""
        for request_id in request_ids or ():
            await self._client.post(f"{self._url}/abort_request", {"rid": request_id})


@dataclass(frozen=True)
class ParsedModelOutput:
    """The parts of a reply. ``ill_formed``: whether the reply has a tool call that cannot be parsed."""

    reasoning: str
    text: str
    tool_uses: list[dict[str, Any]]
    ill_formed: bool = False


def parse_model_output(
    raw_output: str, *, tools_schema: Tools, tool_parser_name: str | None, reasoning_parser_name: str | None
) -> ParsedModelOutput:
    """Parse a reply in the named formats (our names or SGLang's). If the name of a parser is None or unknown, its part
    of the reply (tool calls or thinking) is not parsed."""
    tools, thinking = _known(TOOL_FORMATS, tool_parser_name), _known(REASONING_FORMATS, reasoning_parser_name)
    reasoning, text = read_reasoning(raw_output, REASONING_FORMATS[thinking] if thinking else None, opened=False)
    text, calls, malformed = read_tools(text, TOOL_FORMATS[tools] if tools else None, schemas(tools_schema), "")
    uses = [{"name": call.name, "input": json.loads(call.arguments)} for call in calls]
    return ParsedModelOutput(reasoning or "", text.strip(), uses, bool(malformed))


@dataclass
class AppHandle:
    """A web application on its own thread."""

    port: int
    _thread: LoopThread
    _runner: web.AppRunner

    def stop(self) -> None:
        """Stop listening."""
        self._thread.run(self._runner.cleanup())
        self._thread.close()


def run_app_in_thread(
    app: web.Application,
    *,
    host: str,
    port: int,
    thread_name: str = "agent adapter",
    runner_kwargs: Mapping[str, Any] | None = None,
) -> AppHandle:
    """Serve ``app`` at ``port``. If ``port`` is 0, a free port is chosen, and the returned handle has the number of
    this port.

    Raises:
        OSError: the port is taken.
    """
    thread = LoopThread(thread_name)
    runner = web.AppRunner(app, **{"handler_cancellation": True, **(runner_kwargs or {})})

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, host, port).start()

    try:
        thread.run(start())
    except BaseException:
        thread.close()
        raise
    return AppHandle(runner.addresses[0][1], thread, runner)
