"""What a run writes down; running half of the loop, dumps and self-checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.arguments.flags import flag


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


@dataclass(frozen=True)
class DebugArgs:
    """Debugging."""

    seed: int = flag(1234, "seed of weights and of training")
    dry_run: bool = flag(False, "check everything that can be checked, print the resolved arguments, and stop")
    args_group: list[str] = flag(
        [],
        "dataclass of flags of your own, my_file.py:MyArgs: on the command line, in --help, in config files and as "
        "args.my_flag in plugins; may be given several times",
        repeat=True,
        metavar="CLASS",
    )
    config: str | None = flag(None, "YAML of arguments; the command line wins over it", metavar="FILE")
    custom_config_path: str | None = flag(
        None,
        "another YAML, below --config; a key that is no flag reaches plugins as args.<key>",
        metavar="FILE",
    )
    debug_rollout_only: bool = flag(False, "generate and score, without a trainer")
    debug_train_only: bool = flag(False, "train on given data, without engines")
    save_debug_rollout_data: str | None = flag(
        None, "write each rollout here; {rollout_id} is replaced (eval_<id> for evaluations)", metavar="TEMPLATE"
    )
    load_debug_rollout_data: str | None = flag(
        None, "train on saved rollouts instead of generating; {rollout_id} is replaced", metavar="TEMPLATE"
    )
    load_debug_rollout_data_subsample: float | None = flag(None, "share of the groups of a saved rollout to use")
    dump_details: str | None = flag(None, "--save-debug-rollout-data under this folder", metavar="DIR")
    ci_test: bool = flag(False, "fail when a first-step truth does not hold")
    ci_metric_checker_key: str | None = flag(
        None, "fail at the end unless this metric once reached --ci-metric-checker-threshold, such as eval/gsm8k"
    )
    ci_metric_checker_threshold: float | None = flag(None, "lowest value of that metric that is a success")
    ci_save_grad_norm: str | None = flag(
        None, "write train/grad_norm of each optimizer step to this JSON file", metavar="FILE"
    )
    ci_load_grad_norm: str | None = flag(
        None, "fail when a step's train/grad_norm is not within 3 % of that in this file", metavar="FILE"
    )
    ci_disable_kl_checker: bool = flag(False, "leave the KL out of these checks")
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, "largest difference of trainer and engine log-probs they allow; in fp32 at most 0.001"
    )
