"""Where training ranks and engines run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from slimelite.arguments.base import flag, resolved


class EnginePlace(NamedTuple):
    """One engine: ``width`` GPUs from number ``first_gpu`` of the engines' GPUs on, with SGLang options of its own."""

    first_gpu: int
    width: int
    overrides: dict[str, Any]


@dataclass(frozen=True)
class ClusterArgs:
    """Cluster.

    A "GPU" here is a training rank or an engine on a machine without GPUs, where every count defaults to 1.
    """

    train_backend: Literal["fsdp", "megatron"] = flag(
        "fsdp", "the trainer is FSDP2 over Hugging Face models; megatron, as slime's scripts say, means it too"
    )
    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", "what to compute on", auto="cuda where a GPU is found, else cpu"
    )
    launcher: Literal["ray", "local"] = flag("ray", "Ray actors, or the same classes in this one process (debugging)")
    actor_num_nodes: int = flag(1, "training nodes")
    actor_num_gpus_per_node: int = flag(
        None, "training ranks on each node", auto="the GPUs of this machine, at most 8; 1 on a CPU"
    )
    rollout_num_gpus: int = flag(
        None, "GPUs for inference", auto="those of training with --colocate, one engine on a CPU, else required"
    )
    rollout_num_gpus_per_engine: int = flag(1, "GPUs of one engine (tensor parallel in SGLang)")
    colocate: bool = flag(False, "training and inference share the GPUs and take turns; turns both offloads on")
    offload: bool = flag(False, "--offload-train and --offload-rollout")
    offload_train: bool = flag(
        None, "move the trainer to host memory during rollout", auto="on with --colocate on GPUs"
    )
    offload_rollout: bool = flag(None, "release the engines' memory while training", auto="on with --colocate on GPUs")
    distributed_backend: Literal["nccl", "gloo"] = flag(None, "collectives of training", auto="nccl on GPUs, else gloo")
    distributed_timeout_minutes: int = flag(10, "a collective that takes longer than this fails [min]")
    cpu_threads: int = flag(1, "compute threads of each rank and engine; more than 1 pays on idle cores only")
    train_env_vars: dict[str, Any] = flag(
        {},
        'environment of the training actors, JSON: {"NAME": "value"}; a secret is better exported before Ray starts: '
        "everyone on the machine can read a command line",
    )

    # rollout_num_gpus / rollout_num_gpus_per_engine
    num_engines: int = resolved(1)
    # of each engine, where --sglang-config makes them differ; else they stand side by side, alike
    engine_places: tuple[EnginePlace, ...] = resolved(())

    def engine_place(self, index: int) -> EnginePlace:
        """Where engine number ``index`` runs."""
        width = self.rollout_num_gpus_per_engine
        return self.engine_places[index] if self.engine_places else EnginePlace(index * width, width, {})
