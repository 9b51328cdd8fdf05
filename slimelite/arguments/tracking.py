"""What a run logs; flags to run half of the loop, to dump rollouts and for self-checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slimelite.arguments.conditions import (
    CI,
    DRY_RUN,
    MEMORY_HISTORY,
    POLICY,
    PROFILED_STEPS,
    PROFILER,
    PROMETHEUS,
    TENSORBOARD,
    TRAINING,
    WANDB,
    OfJob,
    use_of,
    when,
)
from slimelite.arguments.flags import ALWAYS, SEEDS, flag
from slimelite.arguments.model import CheckpointArgs
from slimelite.arguments.rollout import DataArgs


@dataclass(frozen=True)
class TrackingArgs(DataArgs, CheckpointArgs):
    """Tracking."""

    run_dir: str = flag(
        None,
        "this folder is the run's alone: it gets config, metrics, rollouts and plots",
        ALWAYS,
        metavar="DIR",
        auto="runs/<name>-<time>",
    )
    save_rollouts: str = flag(
        "all",
        "the run folder keeps the samples, dropped groups and token stats of this many newest rollouts, of all or of "
        "none; the answers of evaluations stay",
        ALWAYS,
        metavar="N",
    )
    use_wandb: bool = flag(False, "metrics go to Weights & Biases", ALWAYS)
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(
        None, "wandb sends the metrics, writes files for a later wandb sync, or does nothing", WANDB
    )
    wandb_dir: str | None = flag(
        None, "the files of wandb go to this folder", WANDB, metavar="DIR", auto="the run folder"
    )
    wandb_key: str | None = flag(None, "this is the API key; it is better in the environment, as WANDB_API_KEY", WANDB)
    wandb_host: str | None = flag(None, "your own wandb server has this address", WANDB, metavar="URL")
    wandb_team: str | None = flag(None, "the run belongs to this team (entity)", WANDB)
    wandb_project: str | None = flag(None, "the run belongs to this project", WANDB, auto="slimelite")
    wandb_group: str | None = flag(None, "the run belongs to this group, and is called so", WANDB)
    wandb_run_name: str | None = flag(None, "the run has this name", WANDB, auto="the group")
    wandb_run_id: str | None = flag(None, "the run with this id goes on", WANDB)
    wandb_random_suffix: bool = flag(
        True,
        "no random letters are added to the group's name",
        WANDB & use_of("--wandb-group"),
        negative="--disable-wandb-random-suffix",
    )
    wandb_always_use_train_step: bool = flag(False, "the x-axis of every metric is the optimizer step", WANDB)
    use_tensorboard: bool = flag(False, "metrics are written for TensorBoard", ALWAYS)
    tensorboard_dir: str | None = flag(
        None, "TensorBoard's files go to this folder", TENSORBOARD, metavar="DIR", auto="in the run folder"
    )
    tb_project_name: str | None = flag(None, "metrics go to this subfolder of TensorBoard's folder", TENSORBOARD)
    tb_experiment_name: str | None = flag(None, "metrics go to this subfolder, in that of the project", TENSORBOARD)
    use_prometheus: bool = flag(
        False, "/metrics answers Prometheus with the newest value of every metric, while the run goes on", ALWAYS
    )
    prometheus_port: int = flag(
        9090,
        "/metrics is on this port; 0 takes a free one, which the console names",
        PROMETHEUS,
        at_least=0,
        at_most=65535,
    )
    prometheus_host: str = flag(
        "127.0.0.1",
        "/metrics is on this address of the machine; 0.0.0.0 is all of them, and everybody who reaches one can read it",
        PROMETHEUS,
    )
    prometheus_run_name: str | None = flag(
        None, "the label run_name of every metric is this", PROMETHEUS, auto="--wandb-group, or the run folder's name"
    )
    token_stats: Literal["computed", "all", "none"] = flag(
        "computed",
        "token_stats/ of the run folder gets the trainer's log-prob and entropy of each response token: of the rows "
        "that a forward pass computes anyway, of all rows with one more pass over the others, or no such file",
        TRAINING,
    )
    log_multi_turn: bool = flag(False, "the log has metrics of multi-turn responses", POLICY)
    log_passrate: bool = flag(False, "the log has pass@k of the training samples", POLICY)
    log_reward_category: str | None = flag(
        None, "the log counts the values of this key of a dict reward, as rollout/error_cat/*", POLICY
    )

    @property
    def rollouts_kept(self) -> int | None:
        """How many of the newest rollouts the run folder keeps; None: all of them."""
        words = {"all": None, "none": 0}
        return words[self.save_rollouts] if self.save_rollouts in words else int(self.save_rollouts)


@dataclass(frozen=True)
class ProfilingArgs(TrackingArgs):
    """Profiling."""

    trace: bool = flag(
        False,
        "trace.json of the run folder says what every worker did when: ui.perfetto.dev and chrome://tracing open it",
        ALWAYS,
    )
    use_pytorch_profiler: bool = flag(
        False, "profile/ of the run folder gets a trace of PyTorch's operations, of each training rank", TRAINING
    )
    profile_rollouts: list[int] = flag(
        [],
        "training on these rollouts is profiled",
        TRAINING & PROFILER.strictly(),
        auto="from --profile-step-start to before --profile-step-end",
    )
    profile_step_start: int = flag(10, "this rollout is the first that is profiled", PROFILED_STEPS, at_least=0)
    profile_step_end: int = flag(12, "this rollout is the first after those", PROFILED_STEPS, at_least=1)
    profile_target: list[Literal["train_overall", "train_actor", "train_log_probs"]] = flag(
        ["train_overall"],
        "this is profiled: all of the training on a rollout, or its forward and backward passes, or its log-probs",
        TRAINING & PROFILER,
    )
    record_memory_history: bool = flag(
        False,
        "CUDA's allocator remembers who took memory when, of each training rank, and a file keeps that: when memory "
        "runs out, after --memory-snapshot-num-steps, and when the run ends",
        TRAINING & when("GPUs", lambda a: a.job.gpus, ": PyTorch keeps the history of CUDA's memory alone").strictly(),
    )
    memory_snapshot_dir: str | None = flag(
        None,
        "the memory's history goes to this folder",
        MEMORY_HISTORY,
        metavar="DIR",
        auto="profile/ of the run folder",
    )
    memory_snapshot_num_steps: int | None = flag(
        None, "the memory's history ends after this many rollouts", MEMORY_HISTORY, at_least=1, auto="all of the run"
    )

    @property
    def profiled_rollouts(self) -> Sequence[int]:
        """The rollouts whose training ``--use-pytorch-profiler`` records."""
        return self.profile_rollouts or range(self.profile_step_start, self.profile_step_end)


@dataclass(frozen=True)
class DebugArgs(OfJob):
    """Debugging."""

    seed: int = flag(1234, "this seeds the whole run", ALWAYS, at_least=SEEDS[0], at_most=SEEDS[-1])
    dry_run: bool = flag(
        False,
        "the run checks everything that can be checked, prints the resolved arguments and the memory, time and traffic "
        "to expect, and stops",
        ALWAYS,
    )
    plan_gpu: str | None = flag(
        None,
        "--dry-run plans for these GPUs instead of this machine's: h100:8, l40s:1 or rtx4090:1, GPUs of one node "
        "(docs/planner.md lists them)",
        DRY_RUN.strictly(),
        metavar="NAME:COUNT",
    )
    import_file: list[str] = flag(
        [],
        "this Python file is run before the command line is read, and in every worker; what it registers, such as an "
        "advantage estimator, is there like our own; may be given several times",
        needs=ALWAYS,
        repeat=True,
        metavar="FILE",
    )
    args_group: list[str] = flag(
        [],
        "this dataclass, my_file.py:MyArgs, has flags of your own: on the command line, in --help, in config files and "
        "as args.my_flag in plugins; it may be given several times",
        ALWAYS,
        repeat=True,
        metavar="CLASS",
    )
    config: str | None = flag(None, "this YAML has arguments; the command line wins over it", ALWAYS, metavar="FILE")
    stages: list[str] = flag(
        [],
        "these YAML files are runs, one after another, each from the model that the one before ends with; other flags "
        "hold for all of them",
        ALWAYS,
        metavar="FILE",
    )
    custom_config_path: str | None = flag(
        None,
        "this is another YAML, below --config; a key that is no flag reaches plugins as args.<key>",
        ALWAYS,
        metavar="FILE",
    )
    debug_rollout_only: bool = flag(False, "the run generates and scores, without a trainer", ALWAYS)
    debug_train_only: bool = flag(False, "the run trains on given data, without engines", ALWAYS)
    save_debug_rollout_data: str | None = flag(
        None,
        "each rollout is written here; {rollout_id} is replaced (eval_<id> for evaluations)",
        ALWAYS,
        metavar="TEMPLATE",
    )
    load_debug_rollout_data: str | None = flag(
        None,
        "saved rollouts are trained on, and none is generated; {rollout_id} is replaced",
        ALWAYS,
        metavar="TEMPLATE",
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None,
        "this share of the groups of a saved rollout is used",
        use_of("--load-debug-rollout-data").strictly(),
        above=0,
        at_most=1,
    )
    dump_details: str | None = flag(
        None,
        "this folder gets what --save-debug-rollout-data writes",
        when(
            "no --save-debug-rollout-data (which wins)",
            lambda a: str(a.save_debug_rollout_data).startswith(f"{a.dump_details}".rstrip("/")),
        ),
        metavar="DIR",
    )
    ci_test: bool = flag(
        False,
        "the run fails when what must hold of its first step does not, such as a KL of 0 to an equal reference",
        TRAINING,
    )
    ci_metric_checker_key: str | None = flag(
        None,
        "the run fails at its end unless this metric once reached --ci-metric-checker-threshold, such as eval/gsm8k",
        when(
            "--ci-metric-checker-threshold (they come together)", lambda a: a.ci_metric_checker_threshold is not None
        ).strictly(),
    )
    ci_metric_checker_threshold: float | None = flag(
        None,
        "this is the lowest value of that metric that is a success",
        when("--ci-metric-checker-key (they come together)", lambda a: a.ci_metric_checker_key is not None).strictly(),
    )
    ci_save_grad_norm: str | None = flag(
        None, "this JSON file gets train/grad_norm of each optimizer step", TRAINING, metavar="FILE"
    )
    ci_load_grad_norm: str | None = flag(
        None,
        "the run fails when a step's train/grad_norm is not within 3 % of that in this file",
        TRAINING,
        metavar="FILE",
    )
    ci_disable_kl_checker: bool = flag(False, "the checks of --ci-test leave the KL out", CI)
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1,
        "the checks of --ci-test let trainer and engine log-probs differ by this; in fp32 by at most 0.001",
        CI,
        at_least=0,
    )
