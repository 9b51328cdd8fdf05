"""The pre-flight checks of ``--environment``, of which one real episode begins, and of ``--agent-command``."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from slimelite.arguments import EnvironmentArgs
from slimelite.environments.episode import row_of
from slimelite.environments.hosts import EnvironmentFailure, Host
from slimelite.environments.protocol import Start
from slimelite.samples.sample import Sample
from slimelite.serving.format import ChatFormat

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


def check_environment(
    args: EnvironmentArgs, tokenizer: PreTrainedTokenizerBase | None, prompt: Sample
) -> tuple[str, int]:
    """What an episode with ``prompt`` shows the model first, in words and in tokens; without a tokenizer that is 0.

    Raises:
        ValueError: the environment cannot be made, ``reset`` fails, or the chat template refuses messages, or cannot be
            used with tools.
    """
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
    assert args.environment is not None
    host = Host(args.environment, call_seconds=args.environment_call_timeout, seconds=args.environment_timeout)
    try:
        live = await host.open()
        start = await live.reset(row_of(prompt, 0))
        await live.close()
        return start
    except EnvironmentFailure as failure:
        raise ValueError(f"an episode with the first prompt does not begin: {failure}") from failure
    finally:
        await host.close()


def check_program(command: str) -> None:
    """Check that the program of ``--agent-command`` is there, and the files that it is to run.

    Raises:
        ValueError: it is not.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{command!r} cannot be split into words: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ValueError(f"there is no program {words[0] if words else ''!r}")
    if missing := [word for word in words[1:] if word.endswith(".py") and not Path(word).is_file()]:
        raise ValueError(f"there is no file {', '.join(missing)}")
