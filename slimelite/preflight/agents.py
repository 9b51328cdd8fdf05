"""Checks the program of an agent, and tries the first episode of an environment, before a run starts."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from slimelite.arguments import EnvironmentArgs
from slimelite.samples.sample import Sample

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from slimelite.environments.protocol import Start


def check_environment(
    args: EnvironmentArgs, tokenizer: PreTrainedTokenizerBase | None, prompt: Sample
) -> tuple[str, int]:
    """What an episode with ``prompt`` first shows the model, in words, and its length [tokens]; 0 without a tokenizer.

    Raises:
        ValueError: the environment cannot be made, ``reset`` fails, the chat template refuses messages, or the chat
            template cannot be used with tools.
    """
    from slimelite.serving.format import ChatFormat

    start = asyncio.run(_begin(args, prompt))
    tools = [tool["function"]["name"] for tool in start.tools]
    shown = f"its tools {', '.join(tools)}" if tools else "no tools"
    if tokenizer is None:
        return f"an episode begins with {len(start.messages)} message(s) and {shown}", 0
    chat_format = ChatFormat(
        tokenizer,
        template_kwargs=args.apply_chat_template_kwargs,
        tool_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
    )
    length = len(chat_format.prompt(list(start.messages), list(start.tools) or None))
    return f"an episode begins with {length} tokens, {shown}", length


async def _begin(args: EnvironmentArgs, prompt: Sample) -> Start:
    from slimelite.environments.episode import row_of
    from slimelite.environments.hosts import EnvironmentFailure, Host

    assert args.environment is not None
    host = Host(args.environment, call_seconds=args.environment_call_timeout, seconds=args.environment_timeout)
    try:
        live = await host.open()
        start = await live.reset(row_of(prompt, 0))
        await live.close()
        return start
    except EnvironmentFailure as failure:
        raise ValueError(f"an episode with the first prompt does not start: {failure}") from failure
    finally:
        await host.close()


def check_program(command: str, *, in_image: bool = False) -> None:
    """Check that the program of ``--agent-command`` and the Python files that it names exist, unless ``in_image``.

    Raises:
        ValueError: the program or a file is missing.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{command!r} cannot be split into words: {error}") from error
    if not words or (shutil.which(words[0]) is None and not in_image):
        raise ValueError(f"there is no program {words[0] if words else ''!r}")
    if not in_image and (missing := [word for word in words[1:] if word.endswith(".py") and not Path(word).is_file()]):
        raise ValueError(f"there is no file {', '.join(missing)}")
