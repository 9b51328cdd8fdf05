"""The loop: prompts -> rollout -> reward -> advantages -> loss -> weights -> engines.

    python train.py --hf-checkpoint Qwen/Qwen2.5-0.5B-Instruct --prompt-data gsm8k/train.parquet --rm-type math ...

``--help`` lists the most common flags, and ``--help-all`` lists all flags. ``--dry-run`` checks a command line without
starting the run.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from slimelite.arguments import parse_args
from slimelite.base.lifecycle import ATTEMPT, StopSignals, Watchdog
from slimelite.base.restarts import keep_running
from slimelite.loop import Evaluations, Saves, due, evaluate, publish, sync
from slimelite.preflight import preflight, problems, problems_of
from slimelite.stages import run_stages

if TYPE_CHECKING:
    from slimelite.cluster import Cluster
    from slimelite.tracking.tracker import Tracker


def train(cluster: Cluster, tracker: Tracker) -> None:
    """Run every rollout from the first to the last. ``--colocate`` requires exactly this order of calls. Each method of
    ``cluster`` returns a future."""
    args, evaluations = cluster.args, Evaluations(cluster.args)
    saves = Saves(args, args.num_rollout)
    sync(cluster, tracker, version=args.start_rollout_id)
    if args.job.evaluates and evaluations.due_at_start():
        evaluate(cluster, tracker, evaluations, args.start_rollout_id - 1)

    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        if evaluations.stop:
            tracker.finish_early(evaluations.stop)
            break
        # the samples have rewards and one advantage per row (algorithms/groups.py); `train` spreads it over tokens
        with tracker.phase("generate") as phase:
            rollout = cluster.generate(rollout_id).result(progress=phase.update)
        tracker.log_rollout(rollout_id, rollout.table, rollout.metrics)
        if args.async_rollout and rollout_id + 1 < args.num_rollout:
            cluster.generate(rollout_id + 1)  # ahead, with the current weights, while this one trains

        if args.job.trains:
            if args.offload_rollout:
                cluster.release_engines().result()
            if args.offload_train:
                cluster.onload_trainers().result()
            with tracker.phase("train"):
                trained = cluster.train(rollout_id, rollout.table).result()
            tracker.log_train(rollout_id, *trained)
            if saves.due(rollout_id):
                with tracker.phase("save_model"):
                    cluster.save(rollout_id).result()
            if args.save_hf and due(args.save_interval, rollout_id, args.num_rollout, last=True):
                with tracker.phase("save_model"):
                    cluster.save_hf(rollout_id).result()
            if due(args.update_weights_interval, rollout_id, args.num_rollout):
                sync(cluster, tracker, version=rollout_id + 1)

        if args.job.evaluates and due(args.eval_interval, rollout_id, args.num_rollout):
            evaluate(cluster, tracker, evaluations, rollout_id)
        tracker.log_perf(cluster.resources().result())
        tracker.finish_rollout(rollout_id)
    tracker.log_facts(evaluations.facts())
    publish(cluster.args, tracker, evaluations)


def main(argv: list[str] | None = None) -> int:
    """Read the command line, check it, start the workers and run the loop. Returns the exit status."""
    with StopSignals() as stop:
        args = parse_args(argv, inspect=problems)
        if args.max_restarts and not args.dry_run and ATTEMPT not in os.environ:
            return keep_running(__file__, sys.argv[1:] if argv is None else argv, args)
        if (status := preflight(args)) or args.dry_run:
            return status
        from slimelite.base.files import hold
        from slimelite.cluster import ClusterError, launch
        from slimelite.tracking.tracker import Tracker

        try:
            folders = {"--run-dir": args.run_dir, "--save": args.save}
            # a command that prints the memory needs of a killed run. It reads config.yaml, because `ps` shows the
            # words of a command line, and they may be secret
            memory = [sys.executable, "-m", "slimelite.plan.run", "--config", f"{args.run_dir}/config.yaml"]
            with (
                hold(folders),
                Watchdog(args.run_dir, memory),
                Tracker(args) as tracker,
                ExitStack() as stack,
            ):
                with tracker.phase("start") as phase:
                    cluster = stack.enter_context(launch(args, phase.update))
                stack.push(tracker.record_failure)  # records a failure before the workers end
                tracker.banner(cluster.args)
                train(cluster, tracker)
        except (ValueError, ClusterError, FloatingPointError, AssertionError, OSError) as error:
            # the message is for the console; log.txt of the run folder has the traceback
            print(f"train.py: {error}", file=sys.stderr)
            return 1
        return 0
    return stop.status  # the status after Ctrl-C or SIGTERM


if __name__ == "__main__":
    sys.exit(run_stages(main, problems_of))
