"""``mini-swe-agent`` with its own configuration against the front; `scripts/test_clients.sh` runs it."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = tempfile.mkdtemp()

import litellm
import minisweagent  # it reads the environment
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from weather import KEY, QUESTION, RULED, in_session

CONFIG = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / "mini.yaml").read_text())
OWN = {name: value for name, value in CONFIG["agent"].items() if name != "mode"}


def ended(url: str, key: str, task: str = QUESTION) -> tuple[dict[str, Any], list[str]]:
    """How the agent ends, and what its commands printed."""
    given = {"api_base": f"{url}/v1", "api_key": key, **CONFIG["model"]["model_kwargs"]}
    model = LitellmModel(**{**CONFIG["model"], "model_name": "openai/ruled", "model_kwargs": given})
    with tempfile.TemporaryDirectory() as folder:
        agent = DefaultAgent(model, LocalEnvironment(**{**CONFIG["environment"], "cwd": folder}), **OWN)
        end = agent.run(task)
    return end, [str(message["content"]) for message in agent.messages if message["role"] == "tool"]


def main() -> None:
    end, said = ended(RULED, KEY)
    assert end["exit_status"] == "Submitted", end
    assert "12 degrees" in said[0], said
    try:  # it knows that a prompt is too long, and does not ask again
        ended(RULED, KEY, "long " * 200_000)
        raise AssertionError("a prompt that is too long was answered")
    except litellm.ContextWindowExceededError:
        pass

    def work(url: str, key: str) -> None:
        ended(url, key)

    assert in_session(work) == [None, 0], "the second turn goes on on the tokens of the first"
    version, beside = map(importlib.metadata.version, ("mini-swe-agent", "litellm"))
    print(
        f"mini-swe-agent {version}: a task with two commands, whole and in a session; a prompt that is too long; "
        f"not: calls without the package `mcp`, which its litellm {beside} imports"
    )


if __name__ == "__main__":
    main()
