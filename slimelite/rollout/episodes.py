"""The generate function of ``--environment``: one episode makes the response, or the responses, to a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slimelite.arguments.secret import masked
from slimelite.engines.http_front import parse_sampling_params
from slimelite.environments.episode import Episode, row_of
from slimelite.rewards.rules import Failure
from slimelite.rollout.context import PluginArgs
from slimelite.samples.sample import Sample, Status
from slimelite.serving.sessions import Session, stream_seed


async def play(
    args: PluginArgs, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """Play an episode of ``--environment`` with the prompt of ``sample``.

    Raises:
        RewardError: the environment failed, and ``--reward-error`` is ``fail``.
        ValueError: see `Episode.play`.
    """
    context = args.rollout_context
    assert context.environment is not None
    sessions, opened = context.sessions(), list[Session]()

    def converse(role: int) -> Session:
        opened.append(sessions.open(f"{sample.session_id}.{role}"))
        return opened[-1]

    stream = "evaluation" if evaluation else "training"
    row = row_of(sample, stream_seed(args.rollout_seed, stream, sample.group_index))
    episode = Episode(
        context.environment,
        converse,
        replace(parse_sampling_params(sampling_params), seed=None),  # each session has a seed of its own
        max_turns=args.environment_max_turns,
        max_tokens=args.environment_max_tokens,
    )
    try:
        await episode.play(row)
    finally:
        for session in opened:
            sessions.close(session.id)
        await episode.close()
    made = episode.samples(sample)
    rule = args.rm_type or args.custom_rm_path or sample.metadata.get("rm_type")
    for each in made:
        if each.reward is None and each.status == Status.TRUNCATED and not rule:
            each.reward = 0.0  # it did not come to the step that would have said so
    if episode.failure is not None:
        failure = Failure(episode.failure.kind, f"the environment: {episode.failure}")
        key = context.eval_reward_key if evaluation else args.reward_key
        context.grader.fail(
            made, failure, f"of --environment {masked('environment', args.environment)}", reward_key=key
        )
    return made
