"""Chat templates are programs that come with a model: one is tried in a process with limits before it is used."""

from __future__ import annotations

import os
import resource
import signal
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# what rendering a few short conversations may take: CPU time [s], memory beyond this process's [bytes], and time [s]
CPU_S, MEMORY, DEADLINE_S = 2, 1 << 29, 60.0
# exit status of the trial
WELL, NO_MEMORY = 0, 3
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "1"}}}
TOOL = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": TOOL}}]
ASKED = [{"role": "user", "content": "a"}]
ANSWERED = [{"role": "system", "content": "s"}, *ASKED, {"role": "assistant", "content": "b"}, *ASKED]
CALLED: list[dict[str, Any]] = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "look", "content": "c"},
]


def try_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render conversations by the chat template, if there is one, in a copy of this process with limits.

    It takes some ten milliseconds. What the template refuses is no matter here.

    Raises:
        ValueError: the template takes too long or too much memory.
    """
    if not tokenizer.chat_template:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a copy of a process with threads may come to a stop: it is ended in time
        child = os.fork()
    if not child:
        os._exit(_trial(tokenizer))  # nothing of this process is cleaned up twice
    status = _ended(child)
    if status == WELL:
        return
    slow = status in (-signal.SIGXCPU, -signal.SIGKILL)
    raise ValueError(
        f"the chat template takes more than {f'{CPU_S} s' if slow else f'{MEMORY >> 20} MB'} to render a few words: it "
        "is broken or hostile; take that of the model's makers (chat_template.jinja or tokenizer_config.json)"
    )


def _trial(tokenizer: PreTrainedTokenizerBase) -> int:
    """The exit status of the copy."""
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(quiet, descriptor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for limit, most in ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, size + MEMORY)):
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    except (OSError, ValueError):
        return WELL  # no such limits on this system
    for messages, tools in ((ASKED, None), (ANSWERED, None), (CALLED, TOOLS)):
        try:
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        except MemoryError:
            return NO_MEMORY
        except Exception:
            continue
    return WELL


def _ended(child: int) -> int:
    """The exit status of a child, negative for a signal; it is killed at the deadline."""
    until = time.monotonic() + DEADLINE_S
    try:
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None and time.monotonic() < until:
            time.sleep(0.002)
    finally:
        os.kill(child, signal.SIGKILL)  # does nothing to one that has ended
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
