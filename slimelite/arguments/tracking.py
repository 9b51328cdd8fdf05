"""Flags for logs, for saved rollouts, for runs that only generate or only train, and for debugging."""

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
        "the run writes config, metrics, rollouts and plots to this folder. Two runs must not share a folder",
        ALWAYS,
        metavar="DIR",
        auto="runs/<name>-<time>",
    )
    save_rollouts: str = flag(
        "all",
        "the run folder keeps the samples, dropped groups and token stats of the newest N rollouts. all: of all "
        "rollouts. none: of no rollout. The answers of evaluations are always kept",
        ALWAYS,
        metavar="N",
    )
    use_wandb: bool = flag(False, "the run sends metrics to Weights & Biases", ALWAYS)
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(
        None,
        "wandb uploads the metrics (online), writes files for a later `wandb sync` (offline), or does nothing "
        "(disabled)",
        WANDB,
    )
    wandb_dir: str | None = flag(
        None, "the files of wandb go to this folder", WANDB, metavar="DIR", auto="the run folder"
    )
    wandb_key: str | None = flag(
        None, "API key of wandb; the environment variable WANDB_API_KEY is a safer place for the key", WANDB
    )
    wandb_host: str | None = flag(None, "address of your own wandb server", WANDB, metavar="URL")
    wandb_team: str | None = flag(None, "the run belongs to this team (entity)", WANDB)
    wandb_project: str | None = flag(None, "the run belongs to this project", WANDB, auto="slimelite")
    wandb_group: str | None = flag(
        None, "the run belongs to this group. The group is also the default of --wandb-run-name", WANDB
    )
    wandb_run_name: str | None = flag(None, "the run has this name", WANDB, auto="the group")
    wandb_run_id: str | None = flag(None, "the run continues the wandb run with this id", WANDB)
    wandb_random_suffix: bool = flag(
        True,
        "no random letters are added to the group's name",
        WANDB & use_of("--wandb-group"),
        negative="--disable-wandb-random-suffix",
    )
    wandb_always_use_train_step: bool = flag(False, "the x-axis of every metric is the optimizer step", WANDB)
    use_tensorboard: bool = flag(False, "the run writes metrics for TensorBoard", ALWAYS)
    tensorboard_dir: str | None = flag(
        None, "the files of TensorBoard go to this folder", TENSORBOARD, metavar="DIR", auto="in the run folder"
    )
    tb_project_name: str | None = flag(None, "metrics go to this subfolder of --tensorboard-dir", TENSORBOARD)
    tb_experiment_name: str | None = flag(None, "metrics go to this subfolder of --tb-project-name", TENSORBOARD)
    use_prometheus: bool = flag(
        False, "during the run, Prometheus can read the newest value of every metric at /metrics", ALWAYS
    )
    prometheus_port: int = flag(
        9090,
        "port of /metrics; with 0, the run takes a free port and prints it",
        PROMETHEUS,
        at_least=0,
        at_most=65535,
    )
    prometheus_host: str = flag(
        "127.0.0.1",
        "/metrics listens on this address. With 0.0.0.0, /metrics listens on all addresses of the machine, and "
        "everyone who can reach the machine can read the metrics",
        PROMETHEUS,
    )
    prometheus_run_name: str | None = flag(
        None, "value of the label run_name of every metric", PROMETHEUS, auto="--wandb-group, or the run folder's name"
    )
    token_stats: Literal["computed", "all", "none"] = flag(
        "computed",
        "the run writes the trainer's log-prob and entropy of response tokens to token_stats/ in the run folder. "
        "computed: for samples whose forward pass computes them anyway. all: for all samples, with one more pass over "
        "the other samples. none: for no samples",
        TRAINING,
    )
    log_multi_turn: bool = flag(False, "the run logs metrics of multi-turn responses", POLICY)
    log_passrate: bool = flag(False, "the run logs pass@k of the training samples", POLICY)
    log_reward_category: str | None = flag(
        None, "if a reward is a dict, the values of this key are counted and logged as rollout/error_cat/*", POLICY
    )

    @property
    def rollouts_kept(self) -> int | None:
        """How many of the newest rollouts the run folder keeps; None: all rollouts."""
        words = {"all": None, "none": 0}
        return words[self.save_rollouts] if self.save_rollouts in words else int(self.save_rollouts)


@dataclass(frozen=True)
class ProfilingArgs(TrackingArgs):
    """Profiling."""

    trace: bool = flag(
        False,
        "the run writes a timeline of the work of every worker to trace.json in the run folder. Open trace.json with "
        "ui.perfetto.dev or chrome://tracing",
        ALWAYS,
    )
    use_pytorch_profiler: bool = flag(
        False, "each training rank writes a trace of PyTorch's operations to profile/ in the run folder", TRAINING
    )
    profile_rollouts: list[int] = flag(
        [],
        "training on these rollouts is profiled",
        TRAINING & PROFILER.strictly(),
        auto="from --profile-step-start to before --profile-step-end",
    )
    profile_step_start: int = flag(10, "the first rollout that is profiled", PROFILED_STEPS, at_least=0)
    profile_step_end: int = flag(12, "the first rollout that is no longer profiled", PROFILED_STEPS, at_least=1)
    profile_target: list[Literal["train_overall", "train_actor", "train_log_probs"]] = flag(
        ["train_overall"],
        "what is profiled. train_overall: all of the training on a rollout. train_actor: its forward and backward "
        "passes. train_log_probs: the computation of log-probs",
        TRAINING & PROFILER,
    )
    record_memory_history: bool = flag(
        False,
        "each training rank records CUDA memory allocations. The rank writes these allocations to a file when memory "
        "runs out, after --memory-snapshot-num-steps, and when the run ends",
        TRAINING & when("GPUs", lambda a: a.job.gpus, ": PyTorch records only the history of CUDA memory").strictly(),
    )
    memory_snapshot_dir: str | None = flag(
        None,
        "the memory history is written to this folder",
        MEMORY_HISTORY,
        metavar="DIR",
        auto="profile/ in the run folder",
    )
    memory_snapshot_num_steps: int | None = flag(
        None, "the memory history ends after this many rollouts", MEMORY_HISTORY, at_least=1, auto="the whole run"
    )

    @property
    def profiled_rollouts(self) -> Sequence[int]:
        """The rollouts on which ``--use-pytorch-profiler`` profiles the training."""
        return self.profile_rollouts or range(self.profile_step_start, self.profile_step_end)


@dataclass(frozen=True)
class DebugArgs(OfJob):
    """Debugging."""

    seed: int = flag(1234, "seed of the whole run", ALWAYS, at_least=SEEDS[0], at_most=SEEDS[-1])
    dry_run: bool = flag(
        False,
        "the command checks everything that can be checked before a run. A dry run prints all arguments and the "
        "expected memory, time and traffic, and stops",
        ALWAYS,
    )
    plan_gpu: str | None = flag(
        None,
        "--dry-run plans for a node with these GPUs instead of this machine's GPUs: h100:8, l40s:1 or rtx4090:1 "
        "(docs/planner.md lists the names). h100:8x3 means 3 such nodes. Without x3, the plan has --actor-num-nodes "
        "such nodes",
        DRY_RUN.strictly(),
        metavar="NAME:COUNT[xNODES]",
    )
    import_file: list[str] = flag(
        [],
        "this Python file runs before the command line is read, and in every worker. What the file registers, such as "
        "an advantage estimator, can be used like a built-in entry. The flag may be given several times",
        needs=ALWAYS,
        repeat=True,
        metavar="FILE",
    )
    args_group: list[str] = flag(
        [],
        "this dataclass, such as my_file.py:MyArgs, defines your own flags. These flags work on the command line, in "
        "--help and in config files, and plugins read them as args.my_flag. The flag may be given several times",
        ALWAYS,
        repeat=True,
        metavar="CLASS",
    )
    config: str | None = flag(
        None, "this YAML file contains arguments; the command line overrides it", ALWAYS, metavar="FILE"
    )
    stages: list[str] = flag(
        [],
        "each of these YAML files is one run. The runs follow one another, and each starts from the final model of "
        "the previous run. All other flags apply to every run",
        ALWAYS,
        metavar="FILE",
    )
    custom_config_path: str | None = flag(
        None,
        "this second YAML file contains arguments, too; --config overrides it. Plugins read a key that is not a flag "
        "as args.<key>",
        ALWAYS,
        metavar="FILE",
    )
    debug_rollout_only: bool = flag(False, "the run generates and scores responses, without a trainer", ALWAYS)
    debug_train_only: bool = flag(
        False, "the run trains on saved rollouts or on data with responses, without engines", ALWAYS
    )
    save_debug_rollout_data: str | None = flag(
        None,
        "each rollout is written to this file. {rollout_id} in the path is replaced by the rollout's number, or by "
        "eval_<number> for an evaluation",
        ALWAYS,
        metavar="TEMPLATE",
    )
    load_debug_rollout_data: str | None = flag(
        None,
        "the run trains on these saved rollouts and generates none. {rollout_id} in the path is replaced by the "
        "rollout's number",
        ALWAYS,
        metavar="TEMPLATE",
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None,
        "the run uses only this fraction of the groups of a saved rollout",
        use_of("--load-debug-rollout-data").strictly(),
        above=0,
        at_most=1,
    )
    dump_details: str | None = flag(
        None,
        "rollouts are written to this folder, in the format of --save-debug-rollout-data",
        when(
            "a run without --save-debug-rollout-data (which overrides this flag)",
            lambda a: str(a.save_debug_rollout_data).startswith(f"{a.dump_details}".rstrip("/")),
        ),
        metavar="DIR",
    )
    ci_test: bool = flag(
        False,
        "the run fails if its first step violates a known property, such as a KL of 0 to an identical reference model",
        TRAINING,
    )
    ci_metric_checker_key: str | None = flag(
        None,
        "the run fails at its end unless this metric, such as eval/gsm8k, reached --ci-metric-checker-threshold at "
        "least once",
        when(
            "--ci-metric-checker-threshold (give both flags)", lambda a: a.ci_metric_checker_threshold is not None
        ).strictly(),
    )
    ci_metric_checker_threshold: float | None = flag(
        None,
        "lowest value of the metric --ci-metric-checker-key that counts as a success",
        when("--ci-metric-checker-key (give both flags)", lambda a: a.ci_metric_checker_key is not None).strictly(),
    )
    ci_save_grad_norm: str | None = flag(
        None, "this JSON file gets the train/grad_norm of each optimizer step", TRAINING, metavar="FILE"
    )
    ci_load_grad_norm: str | None = flag(
        None,
        "the run fails if the train/grad_norm of a step differs by more than 3 % from its value in this file",
        TRAINING,
        metavar="FILE",
    )
    ci_disable_kl_checker: bool = flag(False, "--ci-test does not check the KL", CI)
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1,
        "--ci-test accepts this difference between the log-probs of trainer and engine; in fp32, at most 0.001",
        CI,
        at_least=0,
    )
