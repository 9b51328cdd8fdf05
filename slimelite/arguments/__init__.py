"""The command line. Each file defines a few related groups of flags as dataclasses. All groups are composed into one
flat, frozen, typed `Args`.

This package imports only the standard library, because ``train.py --help`` must be fast.
"""

from slimelite.arguments.algorithm import AlgorithmArgs, CorrectionArgs, CriticArgs, DistillationArgs, PreferenceArgs
from slimelite.arguments.args import Args, Derivation
from slimelite.arguments.engines import SglangArgs, WeightSyncArgs
from slimelite.arguments.evaluation import EvalArgs, EvalDataset
from slimelite.arguments.flags import ArgumentError, flag, plugin, resolved
from slimelite.arguments.model import ArchitectureArgs, CheckpointArgs, ClusterArgs, ModelArgs, model_config_from_flags
from slimelite.arguments.parse import make_args, parse_args
from slimelite.arguments.rollout import DataArgs, EnvironmentArgs, RewardArgs, RolloutArgs
from slimelite.arguments.tracking import DebugArgs, ProfilingArgs, TrackingArgs
from slimelite.arguments.training import LoraArgs, OptimizerArgs, PerfArgs

__all__ = [
    "AlgorithmArgs",
    "ArchitectureArgs",
    "Args",
    "ArgumentError",
    "CheckpointArgs",
    "ClusterArgs",
    "CorrectionArgs",
    "CriticArgs",
    "DataArgs",
    "DebugArgs",
    "Derivation",
    "DistillationArgs",
    "EnvironmentArgs",
    "EvalArgs",
    "EvalDataset",
    "LoraArgs",
    "ModelArgs",
    "OptimizerArgs",
    "PerfArgs",
    "PreferenceArgs",
    "ProfilingArgs",
    "RewardArgs",
    "RolloutArgs",
    "SglangArgs",
    "TrackingArgs",
    "WeightSyncArgs",
    "flag",
    "make_args",
    "model_config_from_flags",
    "parse_args",
    "plugin",
    "resolved",
]
