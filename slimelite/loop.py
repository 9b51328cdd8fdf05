"""The steps of train.py's loop that are more than one verb of the `Cluster`: sync and evaluate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from slimelite.early_stop import due

if TYPE_CHECKING:
    from slimelite.cluster import Cluster
    from slimelite.early_stop import Evaluations
    from slimelite.tracking import Tracker


def sync(cluster: Cluster, tracker: Tracker, version: int) -> None:
    """Send the trainers' weights to the engines. If both take turns on the GPUs, trainers release their memory before
    the engines allocate weights; the KV cache comes last, when no bucket of weights takes its room (slime's order)."""
    args = cluster.args
    if args.debug_rollout_only:
        return
    if args.offload_train:
        cluster.offload_trainers().result()
    if args.offload_rollout:
        cluster.resume_engines("weights").result()
    with tracker.phase("update_weights"):
        tracker.log_perf(cluster.sync(version).result())
    if args.offload_rollout:
        cluster.resume_engines("kv_cache", "cuda_graph").result()


def evaluate(cluster: Cluster, tracker: Tracker, evaluations: Evaluations, rollout_id: int) -> None:
    """Evaluate all eval datasets, and save what the result asks for; ``rollout_id`` -1 is before training.

    It asks for the best weights so far (``--save-best``), and if the run ends early, for what a last rollout leaves.
    """
    args = cluster.args
    with tracker.phase("eval") as phase:
        result = cluster.evaluate(rollout_id).result(progress=phase.update)
    tracker.log_eval(rollout_id, result.metrics, result.tables)
    evaluations.note(rollout_id, result.metrics)
    best, last = evaluations.improved(rollout_id), evaluations.stop is not None
    # the loop has saved before this evaluation what was due then; it has not before one at the start of a resumed run
    saved = rollout_id >= args.start_rollout_id and due(args.save_interval, rollout_id, args.num_rollout)
    checkpoint = args.save is not None and not saved and (best or last)
    models: list[int | Literal["best"]] = []
    if args.save_hf is not None:
        models += ["best"] * best
        models += [rollout_id] * (last and not due(args.save_interval, rollout_id, args.num_rollout, last=True))
    if checkpoint or models:
        if args.offload_rollout:
            cluster.release_engines().result()
        if args.offload_train:
            cluster.onload_trainers().result()
        with tracker.phase("save_model"):
            if checkpoint:
                cluster.save(rollout_id).result()
            for name in models:
                cluster.save_hf(name).result()
        if args.offload_rollout or args.offload_train:
            sync(cluster, tracker, version=rollout_id + 1)
    if best:
        evaluations.mark(rollout_id)
    evaluations.write()
