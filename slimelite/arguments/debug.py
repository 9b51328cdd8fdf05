"""Running half of the loop, dumps and self-checks."""

from __future__ import annotations

from dataclasses import dataclass

from slimelite.arguments.base import flag


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
