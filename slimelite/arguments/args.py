"""All groups in one flat, frozen object, and the draft that `derive` completes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from slimelite.arguments.algorithm import AlgorithmArgs, CorrectionArgs, CriticArgs, DistillationArgs, PreferenceArgs
from slimelite.arguments.engines import SglangArgs, WeightSyncArgs
from slimelite.arguments.evaluation import EvalArgs
from slimelite.arguments.flags import resolved
from slimelite.arguments.model import ArchitectureArgs, CheckpointArgs, ClusterArgs, ModelArgs
from slimelite.arguments.pretraining import PretrainingArgs
from slimelite.arguments.rollout import DataArgs, EnvironmentArgs, RewardArgs, RolloutArgs
from slimelite.arguments.sources import Settings
from slimelite.arguments.tracking import DebugArgs, ProfilingArgs, TrackingArgs
from slimelite.arguments.training import LoraArgs, OptimizerArgs, PerfArgs
from slimelite.plan.devices import Machine

# fixed values of flags that have no field here, for slime's plugins; the command line cannot change them
PLUGIN_CONSTANTS: dict[str, object] = {
    **dict.fromkeys(["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"], 1),
    **dict.fromkeys(["expert_model_parallel_size", "expert_tensor_parallel_size", "sglang_dp_size"], 1),
    **dict.fromkeys(["sequence_parallel", "allgather_cp", "use_slime_router", "use_rollout_routing_replay"], False),
    **dict.fromkeys(["sglang_speculative_algorithm", "sglang_model_routers", "router_policy", "multimodal_keys"], None),
    "sglang_enable_deterministic_inference": False,
    "qkv_format": "thd",  # packed without padding
}


class Derivation(NamedTuple):
    """The value that `derive` or a preset chose for field ``name``, and the reason."""

    name: str
    value: object
    reason: str


# a group inherits from the groups further down whose flags it reads: `EvalArgs` reads flags of `RolloutArgs`
@dataclass(frozen=True)
class Args(
    DebugArgs,
    ProfilingArgs,
    TrackingArgs,
    SglangArgs,
    WeightSyncArgs,
    EvalArgs,
    PerfArgs,
    OptimizerArgs,
    LoraArgs,
    DistillationArgs,
    CriticArgs,
    CorrectionArgs,
    PreferenceArgs,
    AlgorithmArgs,
    RewardArgs,
    EnvironmentArgs,
    RolloutArgs,
    PretrainingArgs,
    DataArgs,
    CheckpointArgs,
    ModelArgs,
    ArchitectureArgs,
    ClusterArgs,
):
    """Every argument of a run as an attribute, such as ``args.rollout_temperature``.

    Each base class is a group of flags, and ``--help-all`` lists these groups from right to left.
    """

    # values from the command line and its files, by field name, before any value is derived
    user_values: dict[str, object] = resolved({})
    derivations: tuple[Derivation, ...] = resolved(())
    notes: tuple[str, ...] = resolved(())
    # keys of --custom-config-path that are not flags; a plugin reads them as attributes
    custom_config: dict[str, object] = resolved({})
    # flags that were given but have no effect -> the reason
    no_effect: tuple[tuple[str, str], ...] = resolved(())

    if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept every misspelt field

        def __getattr__(self, name: str) -> object:
            """``args.key`` for a key of ``--custom-config-path`` or of ``PLUGIN_CONSTANTS``."""
            try:
                return {**PLUGIN_CONSTANTS, **self.__dict__["custom_config"]}[name]
            except KeyError:
                raise AttributeError(f"there is no argument {name}") from None


@dataclass
class Draft:
    """The arguments while `derive` completes them."""

    args: Args
    explicit: frozenset[str]  # fields that the command line or a config file set, not a preset
    machine: Machine
    settings: Settings
    derivations: list[Derivation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def set(self, name: str, value: Any, reason: str) -> None:
        """Give field ``name`` a value, and note the reason."""
        self.args = replace(self.args, **{name: value})
        self.derivations.append(Derivation(name, value, reason))

    def default(self, name: str, value: object, reason: str) -> None:
        """As `set`, unless the field already has a value."""
        if getattr(self.args, name) is None:
            self.set(name, value, reason)

    def complain(self, option: str, what: str) -> None:
        """Record a problem of ``option`` that was found after parsing."""
        self.settings.complain(option, what)
