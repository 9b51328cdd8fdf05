"""The command line: one typed dataclass group per file, composed into one flat, frozen `Args`.

Only the standard library is imported here, so that ``train.py --help`` is instant.
"""

from slimelite.arguments.algorithm import AlgorithmArgs
from slimelite.arguments.architecture import ArchitectureArgs, check_architecture, model_config_from_flags
from slimelite.arguments.args import Args, Derivation
from slimelite.arguments.base import ArgumentError, flag, resolved
from slimelite.arguments.checkpoint import CheckpointArgs, find_checkpoint
from slimelite.arguments.cluster import ClusterArgs
from slimelite.arguments.correction import CorrectionArgs
from slimelite.arguments.critic import CriticArgs
from slimelite.arguments.data import DataArgs
from slimelite.arguments.debug import DebugArgs
from slimelite.arguments.distillation import DistillationArgs
from slimelite.arguments.eval import EvalArgs
from slimelite.arguments.eval_datasets import EvalDataset
from slimelite.arguments.model import ModelArgs
from slimelite.arguments.optimizer import OptimizerArgs
from slimelite.arguments.parse import make_args, parse_args
from slimelite.arguments.perf import PerfArgs
from slimelite.arguments.preference import PreferenceArgs
from slimelite.arguments.reward import RewardArgs
from slimelite.arguments.rollout import RolloutArgs
from slimelite.arguments.sglang import SglangArgs
from slimelite.arguments.tracking import TrackingArgs
from slimelite.arguments.weight_sync import WeightSyncArgs

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
    "EvalArgs",
    "EvalDataset",
    "ModelArgs",
    "OptimizerArgs",
    "PerfArgs",
    "PreferenceArgs",
    "RewardArgs",
    "RolloutArgs",
    "SglangArgs",
    "TrackingArgs",
    "WeightSyncArgs",
    "check_architecture",
    "find_checkpoint",
    "flag",
    "make_args",
    "model_config_from_flags",
    "parse_args",
    "resolved",
]
