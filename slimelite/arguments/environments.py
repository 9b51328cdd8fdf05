"""Environments: what an agent acts in, and the limits of an episode."""

from __future__ import annotations

from dataclasses import dataclass

from slimelite.arguments.conditions import NEW_ROLLOUTS, SAMPLING, given, when
from slimelite.arguments.flags import flag
from slimelite.arguments.rollout import RolloutArgs
from slimelite.environments.registry import ENVIRONMENTS, is_address

# the generate functions of runs with --environment and with --agent-command
EPISODE, PROGRAM = "slimelite.rollout.episodes.play", "slimelite.rollout.episodes.run"
PROGRAMS = SAMPLING & NEW_ROLLOUTS & given("--agent-command")
EPISODES = SAMPLING & NEW_ROLLOUTS & given("--environment")
IN_THIS_RUN = EPISODES & when(
    "an environment that is no address", lambda a: a.environment is None or not is_address(a.environment)
)


@dataclass(frozen=True)
class EnvironmentArgs(RolloutArgs):
    """Environments.

    The model's replies and the steps of an environment take turns: an episode. docs/agents.md says more.
    """

    environment: str | None = flag(
        None,
        lambda: (
            "the model acts in this: "
            + "".join(f"{kind.name} ({kind.summary}), " for kind in ENVIRONMENTS.values())
            + "a class as path/to/file.py:Class, or a server as http://host:port"
        ),
        SAMPLING & NEW_ROLLOUTS,
        metavar="NAME[:SPEC]",
    )
    environment_max_turns: int = flag(16, "an episode has at most this many replies", EPISODES, at_least=1)
    environment_max_tokens: int | None = flag(
        None,
        "the replies of an episode have at most this many tokens together; --rollout-max-response-len bounds each",
        EPISODES,
        at_least=1,
        auto="what --rollout-max-context-len leaves",
    )
    environment_timeout: float = flag(
        600.0, "the environment's part of an episode takes at most this long [s]", EPISODES, above=0
    )
    environment_call_timeout: float = flag(
        60.0, "one call of the environment, such as a tool's, takes at most this long [s]", EPISODES, above=0
    )
    environment_processes: int = flag(
        0, "environments run in this many processes of their own; 0: beside the rollout", IN_THIS_RUN, at_least=0
    )
    agent_command: str | None = flag(
        None,
        "this program answers each prompt: it gets the row as JSON on stdin, finds the model at OPENAI_BASE_URL, and "
        'prints {"reward": 1.0} as its last line, or leaves the score to --rm-type',
        SAMPLING & NEW_ROLLOUTS,
        metavar="COMMAND",
    )
    agent_timeout: float = flag(600.0, "a program takes at most this long, or it has failed [s]", PROGRAMS, above=0)
    agent_programs: int = flag(256, "at most this many programs run at the same time", PROGRAMS, at_least=1)
