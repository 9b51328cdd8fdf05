"""``--rollout-backend scripted``: the embedded engine replies by a script, with the log-probs of its model.

`scripts/lab/client_agents.py` names this file with ``--import-file``. The script mends a repository with a command,
through whichever tool the agent offers. Every second time the mend is wrong. If the agent has subagents, the script
gives the task to one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from slimelite.engines.embedded.engine import EmbeddedEngine
from slimelite.engines.in_process import InProcessEngine, build_in_process
from slimelite.engines.protocol import Codec, EngineSetup, GenerateRequest, GenerateResult, OnTokens
from slimelite.engines.registry import ENGINES, EngineKind

# a tool of an agent -> its argument for a command
TOOLS = {"Bash": "command", "exec_command": "cmd"}
OPERATORS = ("+", "*")
TASK = "test.py fails because of sums.py. Mend sums.py."
END, LAST = "<|im_end|>", "The test passes now."


def call(tool: str, **arguments: object) -> str:
    """A reply with a call."""
    return f"I mend it.\n<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def mending(tool: str, operator: str) -> str:
    """The call that puts ``operator`` into the repository."""
    return call(tool, **{TOOLS[tool]: f"sed -i 's/a - b/a {operator} b/' sums.py"})


LEAVING = call("Agent", description="Mend sums.py", prompt="Mend sums.py by sed.", run_in_background=False)
REPLIES = {LAST, LEAVING, *(mending(tool, operator) for tool in TOOLS for operator in OPERATORS)}


class Scripted(EmbeddedEngine):
    """An engine that replies by the script. `score` gives the log-probs."""

    name = "scripted"

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)  # type: ignore[arg-type]
        self._calls = count()

    async def _generate(
        self, requests: Sequence[GenerateRequest], listener: OnTokens | None = None
    ) -> list[GenerateResult]:
        results = [await self._say(request) for request in requests]
        for result in results:
            if listener is not None:
                listener(result.output_ids, result.log_probs)
        return results

    async def _say(self, request: GenerateRequest) -> GenerateResult:
        prompt = self._tokenizer.decode(list(request.input_ids))
        asked = prompt.rpartition("<|im_start|>user")[2]
        if "<tool_response>" in asked:
            said = LAST
        elif TASK in asked and '"name": "Agent"' in prompt:
            said = LEAVING
        else:
            tool = next(name for name in TOOLS if f'"name": "{name}"' in prompt)
            said = mending(tool, OPERATORS[next(self._calls) % 2])
        ids = self._tokenizer.encode(said + END, add_special_tokens=False)
        scores = await self.score([*request.input_ids, *ids], len(request.input_ids), request.params.temperature)
        version = (await self.info()).weight_version
        return GenerateResult(request.request_id, ids, scores.log_probs, [version] * len(ids), "stop")


def build(setup: EngineSetup, codec: Codec) -> InProcessEngine:
    """The engine of a run."""
    engine: Callable[..., InProcessEngine] = partial(
        Scripted, kv_cache_tokens=setup.kv_cache_tokens, tokenizer=codec.tokenizer
    )
    return build_in_process(engine, setup, codec)


if "scripted" not in ENGINES:  # the script that checks a run imports this file too
    ENGINES.add(EngineKind("scripted", build=build, repeats=True, scores=True))
