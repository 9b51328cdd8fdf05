"""``slimelite chat``: a conversation in the terminal, with a server or with a model that this process serves.

The command is always a client of ``/v1/chat/completions``, so it shows the same answers as any other client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from typing import Any, TextIO

from slimelite.apps.serve import MODEL_HELP, add_model_flags, serving
from slimelite.base.http_client import Client, HttpError
from slimelite.base.threads import LoopThread

# the settings of a request: name of the command -> type of its value
SETTINGS: dict[str, Callable[[str], float]] = {"temperature": float, "top_p": float, "max_tokens": int, "seed": int}
HELP = """/system TEXT      set the system prompt; without TEXT, remove it
/temperature, /top_p, /max_tokens, /seed NUMBER      set it; without NUMBER, use the server's default
/settings         show the settings
/regenerate       get another answer to the last message
/reset            forget the conversation
/quit             leave, as Ctrl-D does
Ctrl-C stops the answer. A line that ends with \\ continues on the next line."""
# the flags that `add_model_flags` adds
MODEL_FLAGS = ("base", "engine", "device", "context_length", "tool_call_parser", "reasoning_parser")
# A model without a chat template continues a text by this many tokens, unless /max_tokens is set.
COMPLETED = 128
LAST_S = 30.0  # time that an interrupted start has to end [s]
EXAMPLES = """examples:
  slimelite chat runs/quickstart/seed-0/grpo           the newest model of a run
  slimelite chat http://127.0.0.1:8000                 a server, such as one that slimelite serve started
  echo "17 + 25 = ?" | slimelite chat MODEL            one question; the output is only its answer
"""


class Chat:
    """One conversation. ``messages``: the conversation. ``settings``: the other fields of requests."""

    def __init__(self, url: str, api_key: str | None, system: str | None, settings: dict[str, float]) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.system, self.settings = system, settings
        self.messages: list[dict[str, str]] = []
        self.model = ""
        self.chats = True

    def meet(self) -> None:
        """Ask the server for the name of its model, and whether the model answers messages or only continues a text.

        Raises:
            HttpError: the server does not answer, or the API key is wrong.
        """

        async def ask() -> dict[str, Any]:
            async with Client() as client:
                models = await client.ask("GET", f"{self.url}/v1/models", headers=self.headers)
                first: dict[str, Any] = models["data"][0]
                return first

        model = asyncio.run(ask())
        self.model, self.chats = str(model["id"]), model.get("chats") is not False

    def ask(self, text: str) -> None:
        """Send a message and print the answer. The message and the answer stay in the conversation.

        Raises:
            HttpError: the server does not answer, or refuses the request. After such an error, the message is no longer
                in the conversation.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            self._answer()
        except HttpError:
            self.messages.pop()
            raise

    def _answer(self) -> None:
        """Print the answer while it arrives, and add the answer to the messages. Ctrl-C stops the answer, and the part
        that has arrived is kept."""
        pieces: list[str] = []
        try:
            finish = asyncio.run(self._print(pieces))
        except KeyboardInterrupt:
            finish = "stopped"
        print()
        if finish in ("length", "stopped"):
            _aside("[stopped]" if finish == "stopped" else "[cut off at max_tokens]")
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    async def _print(self, pieces: list[str]) -> str | None:
        """Print an answer and add its content to ``pieces``. Returns the reason why the answer ended."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        fields: dict[str, Any]
        path, fields = "chat/completions", {"messages": [*system, *self.messages]}
        if not self.chats:
            path, fields = "completions", {"max_tokens": COMPLETED, "prompt": self.messages[-1]["content"]}
        body = {"model": self.model, "stream": True, **fields, **self.settings}
        finish, thinking = None, False
        async with (
            Client() as client,
            aclosing(_choices(client, f"{self.url}/v1/{path}", body, self.headers)) as all_,
        ):
            async for choice in all_:
                delta = choice.get("delta") or {"content": choice.get("text")}
                if thought := delta.get("reasoning_content"):
                    _aside(thought, end="")
                if (content := delta.get("content")) or delta.get("tool_calls"):
                    _aside("\n" * thinking, end="")
                for call in delta.get("tool_calls") or ():
                    _aside(json.dumps(call.get("function"), ensure_ascii=False))
                thinking = bool(thought)
                print(_visible(content or "", sys.stdout), end="", flush=True)
                pieces.append(content or "")
                finish = choice.get("finish_reason") or finish
        return finish

    def command(self, line: str) -> bool:
        """Run the command in a line that begins with /. Returns False if the program should end.

        Raises:
            ValueError: there is no such command, or the command's value is not a number.
            HttpError: see `ask`.
        """
        name, _, text = line[1:].partition(" ")
        text = text.strip()
        if name == "system":
            self.system = text or None
        elif name in SETTINGS:
            self._set(name, text)
        elif name == "settings":
            _aside(json.dumps({"model": self.model, "system": self.system, **self.settings}, ensure_ascii=False))
        elif name == "reset":
            self.messages.clear()
        elif name == "regenerate":
            self._regenerate()
        elif name == "help":
            _aside(HELP)
        elif name in ("quit", "exit"):
            return False
        else:
            raise ValueError(f"there is no command /{name}; /help lists the commands")
        return True

    def _set(self, name: str, text: str) -> None:
        if not text:
            self.settings.pop(name, None)
            return
        try:
            self.settings[name] = SETTINGS[name](text)
        except ValueError:
            raise ValueError(f"/{name} takes a number, not {text!r}") from None

    def _regenerate(self) -> None:
        if not self.messages:
            raise ValueError("/regenerate: there is no message to answer yet")
        before = self.messages.pop()
        try:
            self._answer()
        except HttpError:
            self.messages.append(before)
            raise


async def _choices(client: Client, url: str, body: dict[str, object], headers: dict[str, str]) -> AsyncGenerator[Any]:
    async with aclosing(client.events(url, body, headers)) as events:
        async for event in events:
            if "error" in event:
                raise HttpError(event["error"].get("message", event["error"]))
            for choice in event.get("choices", ()):
                yield choice


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ValueError: there is no such model.
        HttpError: the server does not answer, or refuses a request.
    """
    parser = argparse.ArgumentParser(
        prog="slimelite chat",
        description="Talk to a model in the terminal.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL|RUN|CHECKPOINT|URL", help=f"{MODEL_HELP}; or the URL of a server")
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    for name, kind in SETTINGS.items():
        flag, text = f"--{name.replace('_', '-')}", f"{name} of the requests; /{name} changes it in the conversation"
        parser.add_argument(flag, type=kind, metavar="NUMBER", help=text)
    add_model_flags(parser.add_argument_group("a model that this process serves"))
    args = parser.parse_args(argv)
    settings = {name: value for name in SETTINGS if (value := getattr(args, name)) is not None}
    question = None if sys.stdin.isatty() else sys.stdin.read().strip()
    if question == "":
        raise ValueError("standard input is empty: write a question to it, or start the command in a terminal")
    with _server(args) as url:
        chat = Chat(url, args.api_key, args.system, settings)
        try:
            chat.meet()
            if question:
                chat.ask(question)
                return 0
        except HttpError as error:
            raise ValueError(error) from error
        begins = "" if chat.chats else " continues your texts (it has no chat template)"
        _aside(f"{chat.model}{begins}; /help lists the commands, Ctrl-D ends the chat")
        _talk(chat)
    return 0


def _talk(chat: Chat) -> None:
    """Read the user's lines until the input ends. A line is a command, or a message for the model."""
    with suppress(ImportError):
        import readline  # noqa: F401  # history and editing for input()
    going = True
    while going:
        try:
            line = _line()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            _aside("\nCtrl-D or /quit ends the chat")
            continue
        try:
            if line.startswith("/"):
                going = chat.command(line)
            elif line.strip():
                chat.ask(line)
        except (ValueError, HttpError) as error:
            print(f"slimelite chat: {error}", file=sys.stderr)


def _line() -> str:
    line = input("> ")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input("… ")
    return line


def _visible(text: str, stream: TextIO) -> str:
    """Remove control characters that a terminal would obey, such as sequences that move the cursor."""
    obeyed = stream.isatty() and any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text)
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text) if obeyed else text


def _aside(text: str, end: str = "\n") -> None:
    """Print to standard error a text that is not part of the answer. On a terminal the text is dim."""
    if text:
        dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        print(f"{dim}{_visible(text, sys.stderr)}{plain}", end=end, file=sys.stderr, flush=True)


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """The base URL of the server: ``args.model`` if this is a URL, else the URL of a server in this process."""
    if args.model.startswith(("http://", "https://")):
        if names := [name for name in MODEL_FLAGS if getattr(args, name) not in (None, "embedded")]:
            flag = names[0].replace("_", "-")
            raise ValueError(
                f"--{flag} works only for a model that this process serves, but {args.model} is a server: leave it out"
            )
        yield args.model
        return
    args.host, args.port, args.web, args.api_key = "127.0.0.1", 0, False, secrets.token_urlsafe()
    thread, stack = LoopThread("slimelite chat"), AsyncExitStack()
    try:
        yield thread.run(stack.enter_async_context(serving(args))).url
    finally:
        thread.run(_ended(stack))
        thread.close()


async def _ended(stack: AsyncExitStack) -> None:
    """Close the server. If its start was interrupted, wait until the server has closed itself."""
    await stack.aclose()
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=LAST_S)
