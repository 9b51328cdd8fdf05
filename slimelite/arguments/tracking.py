"""What the run writes down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.arguments.base import flag


@dataclass(frozen=True)
class TrackingArgs:
    """Tracking."""

    run_dir: str = flag(
        None, "folder of this run alone: config, metrics, rollouts, plots", metavar="DIR", auto="runs/<name>-<time>"
    )
    use_wandb: bool = flag(False, "send metrics to Weights & Biases")
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(
        None, "offline writes files for a later wandb sync"
    )
    wandb_dir: str | None = flag(None, "folder of wandb's files", metavar="DIR", auto="the run folder")
    wandb_key: str | None = flag(None, "API key; better in the environment, WANDB_API_KEY")
    wandb_host: str | None = flag(None, "address of your own wandb server", metavar="URL")
    wandb_team: str | None = flag(None, "team (entity)")
    wandb_project: str | None = flag(None, "project", auto="slimelite")
    wandb_group: str | None = flag(None, "group, and name, of the run")
    wandb_run_name: str | None = flag(None, "name of the run", auto="the group")
    wandb_run_id: str | None = flag(None, "id of a run to go on with")
    wandb_random_suffix: bool = flag(
        True, "add random letters to the group's name", negative="--disable-wandb-random-suffix"
    )
    wandb_always_use_train_step: bool = flag(False, "x-axis of every metric is the optimizer step")
    use_tensorboard: bool = flag(False, "write metrics for TensorBoard")
    tensorboard_dir: str | None = flag(None, "folder of TensorBoard's files", metavar="DIR", auto="in the run folder")
    tb_project_name: str | None = flag(None, "subfolder of the TensorBoard folder")
    tb_experiment_name: str | None = flag(None, "subfolder of that")
    log_multi_turn: bool = flag(False, "metrics of multi-turn responses")
    log_passrate: bool = flag(False, "pass@k of the training samples")
    log_reward_category: str | None = flag(None, "key of a dict reward whose values are counted, rollout/error_cat/*")
