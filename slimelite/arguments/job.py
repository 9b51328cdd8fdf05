"""What kind of run the flags ask for: derived here alone, and read as ``args.job`` wherever somebody wants to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from slimelite.algorithms.losses import LOSSES
from slimelite.engines.registry import ENGINES


@dataclass(frozen=True)
class Job:
    """The kind of a run.

    ``trains``: it has training ranks. ``engines``: whose inference engines run; None: none does. ``servers``: an engine
    is a server, reached over HTTP. ``syncs``: trained weights go to engines. ``evaluates``: there are evaluations.
    ``sampled``: the responses that it learns from were sampled, in this run or an earlier one; others stand in the
    data, and have no temperature and no old policy. ``saved``: the files of rollouts to replay, with
    ``{rollout_id}``; None: rollouts are made. ``loss``: its family. ``gpus``: it computes on GPUs. ``local``: it is one
    process, without Ray.
    """

    trains: bool
    engines: Literal["own", "external"] | None
    servers: bool
    syncs: bool
    evaluates: bool
    sampled: bool
    saved: str | None
    loss: Literal["policy", "paired", "supervised", "custom"]
    gpus: bool
    local: bool

    @classmethod
    def of(cls, args: Any) -> Job:
        """The kind of the run with the flags ``args``."""
        loss, trains = LOSSES[args.loss_type], not args.debug_rollout_only
        engines: Literal["own", "external"] = "external" if args.rollout_external_engine_addrs else "own"
        family: Literal["policy", "paired", "supervised", "custom"] = (
            "paired" if loss.paired else "policy" if loss.policy else "supervised" if loss.supervised else "custom"
        )
        runs_engines = not args.debug_train_only
        return cls(
            trains=trains,
            engines=engines if runs_engines else None,
            # until `derive` has chosen one, the engine is "auto"
            servers=args.rollout_backend in ENGINES and ENGINES[args.rollout_backend].server is not None,
            syncs=trains and runs_engines,
            evaluates=runs_engines and bool(args.eval_interval),
            sampled=not loss.supervised,
            saved=args.load_debug_rollout_data,
            loss=family,
            gpus=args.device == "cuda",
            local=args.launcher == "local",
        )


class OfJob:
    """Base of the groups of flags: with any of them one can ask what kind of run they are of."""

    @cached_property
    def job(self) -> Job:
        """The kind of the run."""
        return Job.of(self)


def gpus_of(config: Mapping[str, Any]) -> int:
    """How many GPUs a run with the resolved arguments ``config`` (config.json) holds; 0 on a CPU."""
    if config.get("device") != "cuda":
        return 0
    ranks = 0 if config["debug_rollout_only"] else config["actor_num_nodes"] * config["actor_num_gpus_per_node"]
    engines = 0 if config["debug_train_only"] else config["rollout_num_gpus"]
    return max(ranks, engines) if config["colocate"] else ranks + engines
