"""Files about the time (`--use-pytorch-profiler`) and the GPU memory (`--record-memory-history`) that a rank uses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import profile

from slimelite.arguments import ProfilingArgs

logger = logging.getLogger(__name__)

# passes of `PassTimer` -> the --profile-target that records them
TARGETS = {
    "actor_train": "train_actor",
    **dict.fromkeys(["log_probs", "ref_log_probs", "teacher_log_probs", "token_stats"], "train_log_probs"),
}
# number of allocations and frees that CUDA's allocator records, as in slime
HISTORY = 1_000_000


class Profiler:
    """Profiles the training on some rollouts on one rank, and records the history of the rank's GPU memory. Flags turn
    on the profiling and the recording.

    Traces for Perfetto are in ``profile/{target}-{rollout}-rank{rank}.json.gz`` in the run folder. The memory history,
    for pytorch.org/memory_viz, is in ``memory-rank{rank}.pickle`` in ``--memory-snapshot-dir``.
    """

    def __init__(self, args: ProfilingArgs, rank: int) -> None:
        self.args, self.rank = args, rank
        folder = Path(args.run_dir).absolute() / "profile"
        self._folder = folder
        self._snapshot = Path(args.memory_snapshot_dir or folder).absolute() / f"memory-rank{rank}.pickle"
        self._rollout: int | None = None  # the rollout that is being profiled
        self._remembers = args.record_memory_history
        if self._remembers:
            self._snapshot.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._record_memory_history(max_entries=HISTORY, stacks="all")
            torch._C._cuda_attach_out_of_memory_observer(lambda *_: self._dump())  # type: ignore[attr-defined]

    @contextmanager
    def rollout(self, rollout_id: int) -> Iterator[None]:
        """A context for the training on a rollout. The training is profiled if `--profile-rollouts` selects this
        rollout. Without this flag, `--profile-step-start` and `--profile-step-end` select rollouts."""
        args = self.args
        if args.use_pytorch_profiler and rollout_id in args.profiled_rollouts:
            self._rollout = rollout_id
        try:
            with self._recorded("train_overall") if "train_overall" in args.profile_target else nullcontext():
                yield
        finally:
            self._rollout = None
        if args.memory_snapshot_num_steps is not None and rollout_id + 1 >= args.memory_snapshot_num_steps:
            self.close()

    @contextmanager
    def of_pass(self, name: str) -> Iterator[None]:
        """A context for a pass of the training, such as ``log_probs``. The pass is profiled if `--profile-target`
        selects it."""
        targets = self.args.profile_target
        # a profiler cannot start while the profiler of train_overall runs, which records this pass too
        with self._recorded(name) if "train_overall" not in targets and TARGETS.get(name) in targets else nullcontext():
            yield

    def close(self) -> None:
        """Write the memory history once, and stop recording it."""
        if self._remembers:
            self._remembers = False
            self._dump()
            torch.cuda.memory._record_memory_history(enabled=None)

    @contextmanager
    def _recorded(self, name: str) -> Iterator[None]:
        if self._rollout is None:
            yield
            return
        # slime records the same things
        with profile(record_shapes=True, profile_memory=True, with_stack=True, with_flops=True) as recorded:
            yield
        self._folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self._folder / f"{name}-{self._rollout:07d}-rank{self.rank}.json.gz"))

    def _dump(self) -> None:
        torch.cuda.memory._dump_snapshot(str(self._snapshot))
        logger.warning("the history of rank %d's GPU memory is in %s", self.rank, self._snapshot)
