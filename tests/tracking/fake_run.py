"""A small run without a model: the calls that train.py makes, with made-up numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slimelite.arguments import Args, EvalDataset
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.tracking.tracker import Drawing, Tracker


def make_args(run_dir: Path, **changes: Any) -> Args:
    args = Args(
        run_dir=str(run_dir),
        hf_checkpoint="models/tiny",
        prompt_data=["train.jsonl"],
        device="cpu",
        rollout_backend="embedded",
        launcher="ray",
        actor_num_gpus_per_node=1,
        rollout_num_gpus=1,
        num_rollout=5,
        start_rollout_id=0,
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        global_batch_size=8,
        num_steps_per_rollout=1,
        eval_interval=2,
        eval_datasets=(EvalDataset("sums", "test.jsonl"),),
    )
    return replace(args, **changes)


def make_table(quality: float = 0.5, prompts: int = 4, samples: int = 2) -> SampleTable:
    groups = []
    for g in range(prompts):
        group = []
        for i in range(samples):
            sample = Sample(group_index=g, index=g * samples + i, prompt=f"What is {g} + {i}?", tokens=[1, 2, 3])
            good = (g * samples + i) / (prompts * samples) < quality
            text = f"{g} + {i} = {g + i}\nso \\boxed{{{g + i}}}" if good else f"I think [bold]{g}\x1b[31m{i}"
            sample.append_response_tokens([5] * (4 + g), [-0.5] * (4 + g), text=text)
            sample.label, sample.reward = str(g + i), float(good)
            sample.status = Sample.Status.COMPLETED
            group.append(sample)
        groups.append(group)
    return SampleTable.from_samples(groups)


def make_metrics(i: int) -> dict[str, float]:
    return {
        "train/loss": -0.01 / (i + 1),
        "train/kl_loss": 1e-4 * i,
        "train/entropy_loss": 1.5 - 0.1 * i,
        "train/grad_norm": 0.8 + 0.1 * i,
        "train/train_rollout_logprob_abs_diff": 1e-5,
        "rollout/log_probs": -0.7,
        "perf/actor_train_time": 0.1,
    }


class NoDrawing(Drawing):
    """Draws nothing: a picture takes a process and more than a second, and most tests do not look at it."""

    def begin(self) -> None: ...


def make_tracker(args: Args, *, draws: bool = False) -> Tracker:
    """A tracker, which draws curves.png only if it ``draws``."""
    tracker = Tracker(args)
    if not draws:
        tracker._drawing = NoDrawing(tracker.folder.path)
    return tracker


def play(
    args: Args,
    rollouts: range,
    seconds: float = 0.0,
    then: Callable[[], None] = lambda: None,
    *,
    draws: bool = False,
) -> None:
    """The loop of train.py from ``rollouts.start`` on; generating takes ``seconds``."""
    with make_tracker(args, draws=draws) as tracker:
        tracker.banner(replace(args, start_rollout_id=rollouts.start))
        with tracker.phase("update_weights"):
            tracker.log_perf({"perf/update_weights_bytes": 1e6})
        if rollouts.start == 0:
            evaluate(tracker, -1, 0.1)
        for i in rollouts:
            with tracker.phase("generate") as phase:
                for n in range(4):
                    time.sleep(seconds / 4)
                    phase.update(n + 1, 4, "groups")
            tracker.log_rollout(i, make_table(0.2 + 0.15 * i), {"rollout/truncated_ratio": 0.0})
            with tracker.phase("train"):
                time.sleep(seconds / 2)
            tracker.log_train(i, make_metrics(i))
            with tracker.phase("update_weights"):
                tracker.log_perf({"perf/update_weights_bytes": 1e6})
            if i % 2 == 1:
                evaluate(tracker, i, round(0.2 + 0.15 * i, 2))
            tracker.finish_rollout(i)
        then()


def play_pairs(args: Args, batches: int) -> None:
    """A run of DPO with two pairs in each batch, a loss that falls, and an accuracy and a margin that rise."""
    table = make_table(prompts=2)
    table.label, table.reward = ["chosen", "rejected"] * 2, np.array([1.0, 0.0] * 2)
    with make_tracker(args) as tracker:
        for i in range(batches):
            tracker.log_rollout(i, table, {})
            tracker.log_train(
                i, {"train/loss": 0.75 - i / 4, "train/rewards/accuracies": i / 2, "train/rewards/margins": i / 8}
            )
            tracker.finish_rollout(i)


def evaluate(tracker: Tracker, rollout_id: int, score: float) -> None:
    with tracker.phase("eval"):
        table = make_table(score)
    metrics = {
        "eval/sums": score,
        "eval/sums/response_len/mean": 6.0,
        "eval/sums-truncated_ratio": 0.05,
        "perf/eval_time": 7.0,
    }
    tracker.log_eval(rollout_id, metrics, {"sums": table})
