"""The episodes that a model plays for `slimelite env check --hf-checkpoint`: one rollout without training."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slimelite.arguments import Args, make_args
from slimelite.preflight import inspect

# the suggested context length is a multiple of this [tokens]
CONTEXT_STEP = 128


def model_args(environment: str, options: argparse.Namespace, flags: Sequence[str], run_dir: str) -> Args:
    """The arguments of the rollout. ``flags``: additional flags of train.py, which override the flags that this
    function sets.

    Raises:
        ValueError: some arguments are wrong. The message has one line for each problem.
    """
    words = ["--debug-rollout-only", "--num-rollout", "1", "--launcher", "local", "--environment", environment]
    words += ["--rollout-batch-size", str(options.groups), "--n-samples-per-prompt", str(options.samples)]
    words += ["--environment-max-turns", str(options.max_turns)]
    words += ["--environment-call-timeout", str(options.call_timeout), "--reward-error", "zero"]
    if options.prompt_data:
        words += ["--prompt-data", options.prompt_data, "--input-key", options.input_key]
        words += ["--label-key", options.label_key, "--metadata-key", options.metadata_key]
    words += [word for file in options.import_file for word in ("--import-file", file)]
    return make_args([*words, *flags, "--hf-checkpoint", options.hf_checkpoint, "--run-dir", run_dir])


def play(environment: str, options: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """Play one rollout of ``--groups`` groups. Returns the rollout's facts: spread of rewards, tokens, seconds.

    Raises:
        ValueError: the flags or the model are wrong, or no episode can be played.
    """
    from slimelite.cluster import ClusterError, launch
    from slimelite.plan.devices import this_machine

    with tempfile.TemporaryDirectory(prefix="slimelite-env-") as folder:
        args = model_args(environment, options, flags, folder)
        findings = inspect(args, this_machine())
        if findings.problems:
            raise ValueError("\n".join(findings.problems))
        for warning in findings.warnings:
            print(f"slimelite env: warning: {warning}", file=sys.stderr)
        try:
            with launch(args) as cluster:
                begin = time.monotonic()
                rollout = cluster.generate(0).result()
                seconds = time.monotonic() - begin
        except ClusterError as error:
            raise ValueError(str(error)) from error
    return {"model": options.hf_checkpoint, **facts(rollout.table, rollout.metrics, seconds)}


def facts(table: Any, metrics: Mapping[str, float], seconds: float) -> dict[str, Any]:
    """The facts about a rollout with the samples ``table``, such as the spread of the rewards. The samples of an
    episode share a rollout id, and the reward of an episode is the mean reward of its samples."""
    episodes, row = np.unique(table.rollout_id, return_inverse=True)
    rewards = np.bincount(row, np.nan_to_num(table.reward)) / np.bincount(row)
    group = np.zeros(len(episodes), np.int64)
    group[row] = table.group_id
    spreads = np.array([rewards[group == each].std() for each in np.unique(group)])
    lengths = table.total_lengths
    return {
        "episodes": len(episodes),
        "groups": len(spreads),
        "reward": float(rewards.mean()),
        "spread": float(spreads.mean()),
        "groups_with_gradient": float((spreads > 1e-6).mean()),
        "episodes_per_hour": 3600 * len(episodes) / max(seconds, 1e-9),
        "seconds": seconds,
        "tokens_a_turn": float(table.mask_sums.sum() / max(metrics["rollout/environment/turns"] * len(episodes), 1)),
        "longest": int(lengths.max()),
        "context": int(-(-lengths.max() // CONTEXT_STEP) * CONTEXT_STEP),
        "truncated": float(np.mean([status == "truncated" for status in table.status])),
        "failed": float(metrics["rollout/environment/errors"] + metrics["rollout/environment/timeouts"]),
    }


def lines(played: Mapping[str, Any]) -> list[str]:
    """The facts as lines of text."""
    share, groups = played["groups_with_gradient"], played["groups"]
    text = [
        f"  {played['model']} played {played['episodes']} episodes of {groups} groups: reward {played['reward']:.3g}, "
        f"spread in a group {played['spread']:.3g}; {share:.0%} of the groups have a gradient",
        f"  {played['episodes_per_hour']:,.0f} episodes per hour on this machine, {played['tokens_a_turn']:.0f} "
        f"sampled tokens a turn; the longest sample has {played['longest']} tokens, which fit "
        f"--rollout-max-context-len {played['context']}",
    ]
    if played["truncated"] or played["failed"]:
        cut = f"{played['truncated']:.0%} of the samples were cut off by a limit"
        text.append(f"  {cut}, and {played['failed']:.0f} episodes failed")
    if not share:
        text.append(
            "  no group has a gradient: the model gets the same reward each time, so it would learn nothing in this "
            "environment"
        )
    return text
