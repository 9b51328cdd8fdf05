"""The command line: typed dataclass groups, a few related ones a file, composed into one flat, frozen `Args`.

Only the standard library is imported here, so that ``train.py --help`` is instant.
"""

from slimelite.arguments.algorithm import AlgorithmArgs, CorrectionArgs
from slimelite.arguments.args import Args, Derivation
from slimelite.arguments.evaluation import EvalDataset
from slimelite.arguments.flags import ArgumentError, flag, plugin, resolved
from slimelite.arguments.model import ArchitectureArgs, CheckpointArgs, model_config_from_flags
from slimelite.arguments.parse import make_args, parse_args
from slimelite.arguments.rollout import DataArgs, RewardArgs, RolloutArgs
from slimelite.arguments.tracking import DebugArgs
from slimelite.arguments.training import OptimizerArgs

__all__ = [
    "AlgorithmArgs",
    "ArchitectureArgs",
    "Args",
    "ArgumentError",
    "CheckpointArgs",
    "CorrectionArgs",
    "DataArgs",
    "DebugArgs",
    "Derivation",
    "EvalDataset",
    "OptimizerArgs",
    "RewardArgs",
    "RolloutArgs",
    "flag",
    "make_args",
    "model_config_from_flags",
    "parse_args",
    "plugin",
    "resolved",
]
