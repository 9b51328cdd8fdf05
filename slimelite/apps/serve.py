"""``slimelite serve``: serves a model over HTTP until you interrupt it."""

from __future__ import annotations

import argparse
import asyncio
import errno
import importlib.util
import json
import logging
import math
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slimelite.apps.html import document
from slimelite.apps.runnable import resolve_models, runnable
from slimelite.base.http_server import is_loopback
from slimelite.base.registry import function
from slimelite.engines.protocol import Codec, Engine, EngineInfo, EngineSetup
from slimelite.engines.registry import ENGINES, ServerAddress
from slimelite.serving.tools import REASONING_FORMATS, TOOL_FORMATS
from slimelite.tracking.noise import quiet_transformers

if TYPE_CHECKING:
    from slimelite.serving.front import Front


def main(argv: Sequence[str]) -> int:
    """Serve a model. Returns 0 after an interrupt.

    Raises:
        ValueError: there is no such model, or other machines could use the server without a key.
        OSError: the port is taken, or the address does not belong to this machine.
    """
    args = _parser().parse_args(argv)
    if args.api_key == "":  # `--api-key "$KEY"` with an unset KEY would allow everybody
        raise ValueError("--api-key is empty: give a key, or leave the flag out")
    if not 0 <= args.port < 1 << 16:
        raise ValueError(f"--port must be a number from 0 to 65535, not {args.port}")
    if args.api_key is None and "*" in args.cors_origin:
        raise ValueError("--cors-origin * lets every web page use the model: choose an --api-key, or name the origins")
    for origin in {*args.cors_origin} - {"*"}:
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin, re.IGNORECASE):
            raise ValueError(
                f"--cors-origin {origin} is not an origin: write it as https://chat.example.org, without a path"
            )
    # as browsers send them: in lower case, and without the default port
    args.cors_origin = [
        re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", each.lower()) for each in args.cors_origin
    ]
    if not 0 <= args.drain_seconds < math.inf:
        raise ValueError(f"--drain-seconds must be 0 or more, not {args.drain_seconds:g}")
    if args.api_key is None and not is_loopback(args.host):
        raise ValueError(
            f"--host {args.host} accepts connections from other machines: choose an --api-key, or listen on 127.0.0.1"
        )
    asyncio.run(_serve(args))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slimelite serve", description=__doc__)
    parser.add_argument("model", metavar="MODEL|RUN|CHECKPOINT", help=MODEL_HELP)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; an address that other machines can reach needs an --api-key",
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free port")
    parser.add_argument(
        "--api-key", help="key that clients must send; without one, everyone who can reach the port may use the server"
    )
    parser.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        nargs="+",
        default=[],
        help="web pages of these sites may call the server, such as https://chat.example.org; * allows all sites",
    )
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=10.0,
        help="after SIGTERM or Ctrl-C, running requests have this many seconds to finish; a second signal ends them",
    )
    parser.add_argument("--access-log", action="store_true", help="write a line for each request to standard error")
    parser.add_argument("--web", action="store_true", help="also serve a page to chat with the model")
    add_model_flags(parser)
    return parser


MODEL_HELP = "Hugging Face folder, hub id, adapter, checkpoint of --save, or run folder (its newest model is used)"


# the settings that SGLang and vLLM read from a generation_config.json; and the flag that turns this off
DEFAULTS, NEUTRAL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), "--sampling-defaults openai"


def add_model_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags that describe the model and its engine. `serving` reads them."""
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help="use this base model instead of the base model that the adapter or checkpoint names",
    )
    parser.add_argument("--engine", default="embedded", choices=list(ENGINES), help="what computes")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    parser.add_argument("--context-length", type=int, help="maximum tokens of prompt and response together")
    parser.add_argument(
        "--sampling-defaults",
        choices=["model", "openai"],
        default="model",
        help="sampling settings that a request leaves out. model: temperature, top-p, top-k, min-p and repetition "
        "penalty come from generation_config.json, as in SGLang and vLLM; openai: temperature 1, and every token is "
        "allowed",
    )
    default = "default: found from the chat template"
    parser.add_argument("--tool-call-parser", choices=list(TOOL_FORMATS), help=default)
    parser.add_argument("--reasoning-parser", choices=list(REASONING_FORMATS), help=default)


async def _serve(args: argparse.Namespace) -> None:
    if args.access_log:
        log = logging.getLogger("slimelite.access")
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
        log.propagate = False
    async with serving(args, origins=frozenset(args.cors_origin), logs=args.access_log) as server:
        print(f"{server.path} ({server.info.name}, {server.info.max_context_len} tokens of context) at {server.url}")
        print(_example(server.url, args.api_key, chats=server.chats), flush=True)
        await _interrupt()
        again, drained = (
            asyncio.ensure_future(work) for work in (_interrupt(), server.front.drain(args.drain_seconds))
        )
        await asyncio.wait({again, drained}, return_when=asyncio.FIRST_COMPLETED)


# the scripts of the chat page, in slimelite/apps/page/chat
CHAT = [f"{name}.js" for name in ("tokens", "stream", "store", "rendered", "settings", "turns", "history", "chat")]


class Served(NamedTuple):
    """A served model: its folder or hub id, the URL, the engine, whether there is a chat template, and the
    server."""

    path: str
    url: str
    info: EngineInfo
    chats: bool
    front: Front


@asynccontextmanager
async def serving(
    args: argparse.Namespace, *, origins: frozenset[str] = frozenset(), logs: bool = False
) -> AsyncIterator[Served]:
    """A server of ``args.model`` on the running event loop. The server runs until the block ends.

    ``origins``, ``logs``: see `Server`.

    Raises:
        ValueError: there is no such model.
        OSError: the port is taken, or the address does not belong to this machine.
    """
    from slimelite.data.messages import try_template
    from slimelite.data.tokenizer import check_files, load_tokenizer, stop_token_ids
    from slimelite.engines.sampling import engine_sampler
    from slimelite.models.checkpoints import read_config
    from slimelite.models.families import text_config
    from slimelite.models.files import has_weights
    from slimelite.plan.devices import this_machine
    from slimelite.serving.format import ChatFormat
    from slimelite.serving.front import Front
    from slimelite.serving.sessions import Sessions

    gpus = this_machine().gpus
    if args.context_length is not None and args.context_length < 1:
        raise ValueError(f"--context-length must be at least 1, not {args.context_length}")
    package = ENGINES[args.engine].package
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"--engine {args.engine}: {package} is not installed: see docs/install.md, or use --engine embedded"
        )
    if args.device == "cuda" and not gpus:
        raise ValueError("--device cuda: torch finds no GPU")
    device = args.device or ("cuda" if gpus else "cpu")
    parsers = {"tool_parser": args.tool_call_parser, "reasoning_parser": args.reasoning_parser}
    async with AsyncExitStack() as stack:
        # report mistakes before transformers is imported and a model is loaded
        (source,) = resolve_models([args.model], args.base)
        if source.base is None:
            check_files(source.path)
        await _try_address(args.host, args.port)
        quiet_transformers()
        path = stack.enter_context(runnable(source, "bfloat16" if device == "cuda" else "float32"))
        tokenizer = load_tokenizer(path)
        try_template(tokenizer)
        ends = stop_token_ids(path, tokenizer)
        chat_format = ChatFormat(tokenizer, end_ids=ends, **parsers)
        if not has_weights(path):
            print(f"warning: {path} contains no weights: the server uses random weights", file=sys.stderr)
        known = text_config(read_config(path)).get("max_position_embeddings")
        if known is not None and (args.context_length or 0) > known:
            what = f"--context-length {args.context_length} is more than the model's {known} tokens"
            print(f"warning: {what}; the model was not trained on longer texts", file=sys.stderr)
        codec = Codec(chat_format.decode, chat_format.encode_text, ends, tokenizer)
        engine = await stack.enter_async_context(_engine(args, path, device, codec))
        info = await engine.info()
        defaults = sampling_defaults(path) if args.sampling_defaults == "model" else {}
        sessions = Sessions(chat_format, engine_sampler(engine), info.max_context_len, defaults)
        name = Path(args.model).resolve().name if Path(args.model).exists() else args.model
        page = chat_page() if args.web else None
        front = Front(sessions, engine, name, key=args.api_key, host=args.host, port=args.port, page=page)
        front.origins, front.logs = origins, logs
        stack.push_async_callback(front.stop)
        yield Served(source.path, await front.start(), info, bool(tokenizer.chat_template), front)


def sampling_defaults(path: str) -> dict[str, float]:
    """The sampling settings in the ``generation_config.json`` of a model, under the names of `SamplingParams`.

    Raises:
        ValueError: a value is not a number.
    """
    from transformers.utils import cached_file

    from slimelite.models.checkpoints import read_json

    file = cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    config = read_json(Path(file)) if file is not None else {}
    config |= {"top_k": -1} if config.get("top_k") == 0 else {}
    values = {name: config[name] for name in DEFAULTS if config.get(name) is not None}
    if wrong := [
        name for name, value in values.items() if isinstance(value, bool) or not isinstance(value, int | float)
    ]:
        raise ValueError(f"{file}: {wrong[0]} is {values[wrong[0]]!r:.60}, not a number: fix it, or give {NEUTRAL}")
    return values


async def _try_address(host: str, port: int) -> None:
    try:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ValueError(f"--port {port} is taken on {host}: choose another port, or 0 for a free port") from error
    server.close()
    await server.wait_closed()


def chat_page() -> str:
    """The page for a chat with the model: one HTML file that sends its requests to its own server."""
    folder = files("slimelite.apps") / "page" / "chat"
    scripts = [folder / name for name in CHAT]
    return document(scripts, [folder / "chat.css"], "{}", asks=True)


def _example(url: str, key: str | None, *, chats: bool) -> str:
    """An example command that sends a request to the server."""
    path, body = "completions", {"prompt": "Once upon a time", "max_tokens": 32}
    if chats:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    headers = ["-H", "Content-Type: application/json", *(["-H", f"Authorization: Bearer {key}"] if key else [])]
    return shlex.join(["curl", f"{url}/v1/{path}", *headers, "-d", json.dumps(body)])


async def _interrupt() -> None:
    """Wait for Ctrl-C or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


@asynccontextmanager
async def _engine(args: argparse.Namespace, path: str, device: str, codec: Codec) -> AsyncIterator[Engine]:
    """Start the engine. If the engine is a server, its process runs until the block ends."""
    kind, process = ENGINES[args.engine], None
    with tempfile.TemporaryDirectory(prefix="slimelite-serve-") as folder:
        log, length = Path(folder) / "engine.log", args.context_length
        setup = EngineSetup(path, device, seed=0, host="127.0.0.1", log=log, max_context_len=length)
        if kind.server is None:
            assert kind.build is not None
            engine = function(kind.build, "--engine", kind.name)(setup, codec)
        else:
            process = function(kind.server.process, "--engine", kind.name)(setup)
            print(f"starting {kind.name}; its log is {log}", file=sys.stderr)
            url = await asyncio.to_thread(process.start)
            engine = function(kind.server.connect, "--engine", kind.name)(setup, codec, ServerAddress(url), None)
        try:
            yield engine
        finally:
            await engine.close()
            if process is not None:
                await asyncio.to_thread(process.close)
