"""Your own training loop, with every flag of train.py.

    python docs/examples/own_loop.py --hf-checkpoint Qwen/Qwen2.5-0.5B-Instruct --prompt-data gsm8k/train.parquet ...

Its results equal those of ``train.py`` with the same flags, also with ``--async-rollout``. A rollout is one step.
docs/python.md explains the verbs.
"""

from __future__ import annotations

import sys

from slimelite.arguments import parse_args
from slimelite.cluster import Cluster, launch
from slimelite.preflight import preflight
from slimelite.tracking.tracker import Tracker


def loop(cluster: Cluster, tracker: Tracker) -> None:
    """Generate, train and sync. A line without ``.result()`` does not wait."""
    args = cluster.args
    cluster.sync(args.start_rollout_id)
    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        last = rollout_id + 1 == args.num_rollout
        with tracker.phase("generate") as phase:
            rollout = cluster.generate(rollout_id).result(progress=phase.update)
        tracker.log_rollout(rollout_id, rollout.table, rollout.metrics)
        if args.async_rollout and not last:
            cluster.generate(rollout_id + 1)  # it begins before the sync below, so it uses the current weights
        gradient = cluster.forward_backward(rollout.table)
        step = cluster.optim_step()
        if args.save and last:
            cluster.save(rollout_id)
        sync = cluster.sync(rollout_id + 1)
        tracker.log_train(rollout_id, gradient.result() | step.result())
        tracker.log_perf(sync.result())
        tracker.finish_rollout(rollout_id)


def main(argv: list[str] | None = None) -> int:
    """Read the command line, check it, start the workers and run the loop. Returns the exit status."""
    args = parse_args(argv)  # groups=[MyArgs] adds your own flags
    if (status := preflight(args)) or args.dry_run:
        return status
    with Tracker(args) as tracker, launch(args) as cluster:
        tracker.banner(cluster.args)
        loop(cluster, tracker)
    return 0


if __name__ == "__main__":
    sys.exit(main())
