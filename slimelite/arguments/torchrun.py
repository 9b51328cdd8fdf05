"""Choose the launcher, and set the ranks of a run that torchrun has started."""

from __future__ import annotations

import os

from slimelite.arguments.args import Draft


def choose_launcher(draft: Draft) -> None:
    """Choose the launcher: torchrun if torchrun has started this process, else Ray."""
    started = "TORCHELASTIC_RUN_ID" in os.environ
    draft.default(
        "launcher", "torchrun" if started else "ray", "torchrun has started this process" if started else "the default"
    )
    if (draft.args.launcher == "torchrun") != started:
        remedy = "leave --launcher out" if started else "start the run with torchrun --nproc-per-node 8 train.py ..."
        draft.complain("--launcher", f"{draft.args.launcher}: {remedy}")
        return
    if not started:
        return
    if draft.args.job.engines:
        draft.complain(
            "--launcher", "torchrun is for runs without engines, and this run needs engines: start it without torchrun"
        )
    world, local = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    for name, value in (("actor_num_gpus_per_node", local), ("actor_num_nodes", world // local)):
        if name in draft.explicit and getattr(draft.args, name) != value:
            draft.complain("--" + name.replace("_", "-"), f"{getattr(draft.args, name)}: torchrun has started {value}")
        draft.set(name, value, "torchrun's processes")
