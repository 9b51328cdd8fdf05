"""The generate functions of ``--environment`` and ``--agent-command``. With ``--environment``, the responses to a
prompt come from an episode in an environment. With ``--agent-command``, the responses come from a program that calls
the model through its own session."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from slimelite.arguments.secret import masked
from slimelite.engines.http_front import parse_sampling_params
from slimelite.engines.protocol import stream_seed
from slimelite.environments.episode import Episode, row_of, timeline
from slimelite.environments.program import LOGGED, Ended
from slimelite.environments.registry import FACTS
from slimelite.rewards.rules import Failure
from slimelite.rollout.context import PluginArgs
from slimelite.samples.sample import Sample, Status
from slimelite.serving.sessions import Session

logger = logging.getLogger(__name__)


async def play(
    args: PluginArgs, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """Let the model play one episode of ``--environment``. The episode starts from the prompt of ``sample``.

    Raises:
        RewardError: the environment failed, and ``--reward-error`` is ``fail``.
        ValueError: see `Episode.play`.
    """
    context = args.rollout_context
    assert context.environment is not None
    sessions, opened, tried = context.sessions(), list[Session](), False

    def converse(role: int) -> Session:
        opened.append(sessions.open(f"{sample.session_id}.{role}"))
        return opened[-1]

    stream = "evaluation" if evaluation else "training"
    row = row_of(sample, stream_seed(args.rollout_seed, stream, sample.group_index))
    while True:
        episode = Episode(
            context.environment,
            converse,
            replace(parse_sampling_params(sampling_params), seed=None),  # each session has its own seed
            max_turns=args.environment_max_turns,
            max_tokens=args.environment_max_tokens,
        )
        try:
            await episode.play(row)
        finally:
            while opened:
                sessions.close(opened.pop().id)
            await episode.close()
        if tried or episode.failure is None or not episode.failure.lost:
            break
        tried = True
        logger.warning("the worker process of an episode died (%s), so the episode is repeated", episode.failure)
    made = episode.samples(sample)
    rule = args.rm_type or args.custom_rm_path or sample.metadata.get("rm_type")
    for each in made:
        if each.reward is None and each.status == Status.TRUNCATED and not rule:
            each.reward = 0.0  # the episode ended before the environment gave this player a reward
    if episode.failure is not None:
        failure = Failure(episode.failure.kind, f"the environment: {episode.failure}")
        key = context.eval_reward_key if evaluation else args.reward_key
        context.grader.fail(
            made, failure, f"of --environment {masked('environment', args.environment)}", reward_key=key
        )
    return made


async def run(
    args: PluginArgs, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """Run the program of ``--agent-command`` on the prompt of ``sample``. Each branch of the program's session becomes
    a sample.

    Raises:
        RewardError: the program failed, and ``--reward-error`` is ``fail``.
        OSError: the program cannot be started.
    """
    context = args.rollout_context
    assert context.programs is not None
    sessions, front = context.sessions(), await context.front()
    defaults = replace(parse_sampling_params(sampling_params), seed=None)  # the session has its own seed
    session = sessions.open(sample.session_id, defaults=defaults)
    session.longest_reply = defaults.max_new_tokens  # a program may request more tokens, and Claude Code always does
    base = f"{front}/sessions/{session.id}"
    variables = {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": session.key,
    }
    stream = "evaluation" if evaluation else "training"
    row = row_of(sample, stream_seed(args.rollout_seed, stream, sample.group_index))
    try:
        state = context.states[str(sample.session_id)]
        ended = await context.programs.run(vars(row), variables, front, lambda: state.paused)
    finally:
        sessions.close(session.id)
    failure = _failure(ended, session)
    made = _samples(sample, session, ended, failure)
    reward = f"reward {made[0].reward}" if failure is None else failure.message
    context.programs.log(str(sample.session_id), ended, f"{len(session.turns)} replies, {reward}")
    if failure is not None:
        key = context.eval_reward_key if evaluation else args.reward_key
        context.grader.fail(made, failure, f"of --agent-command {args.agent_command}", reward_key=key)
    return made


def _failure(ended: Ended, session: Session) -> Failure | None:
    """The reason why the program has not produced an answer. Returns None if it has produced one."""
    if ended.status is None:
        return Failure("timeout", f"the program took longer than {ended.seconds:.0f} s (--agent-timeout)")
    if ended.status:
        last = (ended.errors.strip().splitlines() or [""])[-1]
        return Failure("crash", f"the program ended with exit status {ended.status}: {last:.200}")
    if not session.turns:
        return Failure("invalid", "the program never called the model, which it can reach at OPENAI_BASE_URL")
    try:
        _ = ended.reward
    except ValueError as error:
        return Failure("invalid", str(error))
    return None


def _samples(sample: Sample, session: Session, ended: Ended, failure: Failure | None) -> list[Sample]:
    """The samples of the session. The samples have the program's reward. If the program gave no reward, the samples
    have no reward, and the run's reward function scores them."""
    turns = session.turns
    facts = {
        "turns": len(turns),
        "tool_calls": sum(len(turn.reply.tool_calls) for turn in turns),
        "malformed_calls": sum(len(turn.reply.malformed) for turn in turns),
        "timeouts": int(ended.status is None),
        "errors": int(failure is not None and ended.status is not None),
        "context_full": int(session.overflows > 0),
        "seconds": ended.seconds,
        "metrics": {"silent_programs": float(not turns)},
        "timeline": timeline([session]),
    }
    made = session.samples(sample) if turns else [replace(sample, remove_sample=True)]
    for each in made:
        each.metadata = {**each.metadata, FACTS: facts}
        if each is made[0]:
            each.metadata[FACTS] = {
                **facts,
                "log": {"stdout": ended.output[-LOGGED:], "stderr": ended.errors[-LOGGED:]},
            }
        each.non_generation_time = ended.seconds
        if failure is None:
            each.reward = ended.reward
        else:
            each.status = Status.FAILED
    return made
