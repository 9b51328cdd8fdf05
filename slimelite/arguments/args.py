"""All groups in one flat, frozen object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from slimelite.arguments.algorithm import AlgorithmArgs, CorrectionArgs, CriticArgs, DistillationArgs, PreferenceArgs
from slimelite.arguments.engines import SglangArgs, WeightSyncArgs
from slimelite.arguments.evaluation import EvalArgs
from slimelite.arguments.flags import resolved
from slimelite.arguments.model import CheckpointArgs, ClusterArgs, ModelArgs
from slimelite.arguments.rollout import DataArgs, RewardArgs, RolloutArgs
from slimelite.arguments.tracking import DebugArgs, TrackingArgs
from slimelite.arguments.training import OptimizerArgs, PerfArgs

# what plugins of slime's read of flags that are no fields here, whatever was given for them
PLUGIN_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"], 1),
    **dict.fromkeys(["expert_model_parallel_size", "expert_tensor_parallel_size", "sglang_dp_size"], 1),
    **dict.fromkeys(["sequence_parallel", "allgather_cp", "use_slime_router", "use_rollout_routing_replay"], False),
    **dict.fromkeys(["sglang_speculative_algorithm", "sglang_model_routers", "router_policy", "multimodal_keys"], None),
    "sglang_enable_deterministic_inference": False,
    "qkv_format": "thd",  # packed without padding
}


class Derivation(NamedTuple):
    """A value that nobody gave, and why it is what it is."""

    name: str
    value: object
    reason: str


@dataclass(frozen=True)
class Args(
    DebugArgs,
    TrackingArgs,
    SglangArgs,
    WeightSyncArgs,
    EvalArgs,
    PerfArgs,
    OptimizerArgs,
    DistillationArgs,
    CriticArgs,
    CorrectionArgs,
    PreferenceArgs,
    AlgorithmArgs,
    RewardArgs,
    RolloutArgs,
    DataArgs,
    CheckpointArgs,
    ModelArgs,
    ClusterArgs,
):
    """Every argument of a run, flat: ``args.rollout_temperature``. Bases are read right to left."""

    derivations: tuple[Derivation, ...] = resolved(())
    notes: tuple[str, ...] = resolved(())
    # keys of --custom-config-path that are no flags; a plugin reads them as attributes
    custom_config: dict[str, Any] = resolved({})
    # flags that were given and change nothing here -> why
    no_effect: tuple[tuple[str, str], ...] = resolved(())

    if not TYPE_CHECKING:  # a type checker would then take every misspelt field for a key of the user's

        def __getattr__(self, name: str) -> Any:
            """A key of ``--custom-config-path``, or what else slime's plugins read: ``args.key``."""
            try:
                return {**PLUGIN_CONSTANTS, **self.__dict__["custom_config"]}[name]
            except KeyError:
                raise AttributeError(f"there is no argument {name}") from None
