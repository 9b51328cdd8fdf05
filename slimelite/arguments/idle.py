"""Flags that were given but change nothing in this run, such as ``--mis-level`` without ``--correction mis``.

They are no errors. The run lists them under "no effect here" when it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from slimelite.algorithms.estimators import ESTIMATORS, Estimator
from slimelite.arguments.args import Args
from slimelite.arguments.flags import all_flags
from slimelite.engines.registry import ENGINES


def _runs_servers(args: Args) -> bool:
    return ENGINES[args.rollout_backend].server is not None


def _has_advantages(args: Args) -> bool:
    """Whether the loss has advantages."""
    return not args.supervised and args.compute_advantages_and_returns


def _named(fact: Callable[[Estimator], object]) -> str:
    """``--advantage-estimator`` with the names of those for which ``fact`` holds."""
    return "--advantage-estimator " + " or ".join(e.name for e in ESTIMATORS.values() if fact(e))


# flag -> what it needs to mean anything; given without, it is listed under "no effect here"
NEEDS: dict[str, tuple[Callable[[Args], Any], str]] = {
    **dict.fromkeys(
        ["correction", "use_tis", "custom_tis_function_path", "use_opsm", "custom_pg_loss_reducer_function_path"],
        (lambda a: a.loss_type == "policy_loss", "--loss-type policy_loss"),
    ),
    **dict.fromkeys(
        ["tis_clip", "tis_clip_low"],
        (lambda a: a.correction in ("tis", "icepop", "custom"), "--correction tis or icepop"),
    ),
    **dict.fromkeys(
        ["mis_level", "mis_mode", "mis_upper_bound", "mis_rejection_level", "mis_veto_threshold", "use_rs"],
        (lambda a: a.correction == "mis", "--correction mis"),
    ),
    "mis_batch_normalize": (
        lambda a: a.correction == "mis" and a.mis_mode != "none",
        "--correction mis with a --mis-mode that weighs",
    ),
    "mis_lower_bound": (
        lambda a: a.correction == "mis" and (a.mis_mode in ("mask", "clip") or a.mis_rejection_level),
        "--correction mis with --mis-mode mask or clip, or with --mis-rejection-level",
    ),
    **dict.fromkeys(
        ["mis_rejection_upper_bound", "mis_rejection_lower_bound"],
        (lambda a: a.correction == "mis" and a.mis_rejection_level, "--correction mis --mis-rejection-level"),
    ),
    **dict.fromkeys(["opd_type", "opd_kl_coef"], (lambda a: a.use_opd, "--use-opd")),
    "overlong_penalty_factor": (lambda a: a.overlong_buffer_len, "--overlong-buffer-len"),
    "opsm_delta": (lambda a: a.use_opsm, "--use-opsm"),
    **dict.fromkeys(
        ["kl_coef", "use_kl_loss", "kl_loss_coef", "log_ref_kl", "entropy_coef", "overlong_buffer_len"],
        (lambda a: not a.supervised, "--loss-type policy_loss or custom_loss"),
    ),
    **dict.fromkeys(
        ["advantage_estimator", "eps_clip", "eps_clip_high", "use_rollout_logprobs", "format_reward_coef"],
        (lambda a: not a.supervised, "--loss-type policy_loss or custom_loss"),
    ),
    "eps_clip_c": (
        lambda a: not a.supervised and a.estimator.dual_clip,
        "--loss-type policy_loss and " + _named(lambda e: e.dual_clip),
    ),
    **dict.fromkeys(
        ["normalize_advantages", "custom_advantage_function_path"],
        (_has_advantages, "a loss with advantages"),
    ),
    "gamma": (
        lambda a: (_has_advantages(a) and a.estimator.discounts) or a.custom_advantage_function_path,
        _named(lambda e: e.discounts),
    ),
    "rewards_normalization": (
        lambda a: (_has_advantages(a) and a.estimator.group is not None) or a.custom_reward_post_process_path,
        "an --advantage-estimator that compares the responses to a prompt",
    ),
    "grpo_std_normalization": (
        lambda a: (
            (_has_advantages(a) and a.estimator.divides_by_std and a.rewards_normalization)
            or a.custom_reward_post_process_path
        ),
        _named(lambda e: e.divides_by_std) + ", and rewards compared within their group",
    ),
    "custom_loss_function_path": (lambda a: a.loss_type == "custom_loss", "--loss-type custom_loss"),
    # without --rm-type the samples say how to score them
    "format_regex": (
        lambda a: (
            a.rm_type in (None, "format") or a.format_reward_coef or any(d.rm_type == "format" for d in a.eval_datasets)
        ),
        "--rm-type format, or --format-reward-coef",
    ),
    **dict.fromkeys(
        ["kl_loss_type", "use_unbiased_kl"],
        (lambda a: a.use_reference and not a.supervised, "a KL coefficient above 0, or --log-ref-kl"),
    ),
    **dict.fromkeys(
        ["ref_load", "ref_update_interval"],
        (lambda a: a.use_reference, "a KL coefficient above 0, --log-ref-kl, or --loss-type dpo_loss"),
    ),
    **dict.fromkeys(
        ["chosen_key", "rejected_key", "dpo_loss", "dpo_beta"],
        (lambda a: a.loss_type == "dpo_loss", "--loss-type dpo_loss"),
    ),
    "dpo_label_smoothing": (
        lambda a: a.loss_type == "dpo_loss" and a.dpo_loss == "sigmoid",
        "--loss-type dpo_loss with --dpo-loss sigmoid",
    ),
    "n_samples_per_prompt": (
        lambda a: a.loss_type != "dpo_loss",
        "generated responses; a pair has its two replies already",
    ),
    **dict.fromkeys(
        ["value_clip", "lambd", "critic_lr", "critic_lr_warmup_iters", "num_critic_only_steps", "critic_load"],
        (lambda a: a.use_critic, _named(lambda e: e.needs_critic)),
    ),
    "mask_offpolicy_in_partial_rollout": (
        lambda a: a.partial_rollout or (a.over_sampling_batch_size or 0) > (a.rollout_batch_size or 0),
        "--partial-rollout, or --over-sampling-batch-size above --rollout-batch-size",
    ),
    "keep_dropped": (lambda a: not (a.supervised or a.debug_train_only), "responses to generate"),
    "update_weights_interval": (lambda a: a.async_rollout, "--async-rollout"),
    "micro_batch_size": (lambda a: not a.use_dynamic_batch_size, "no --use-dynamic-batch-size"),
    **dict.fromkeys(
        ["load_fallback", "no_load_optim", "no_load_rng", "override_lr_scheduler"],
        (lambda a: a.load, "--load"),
    ),
    **dict.fromkeys(["no_save_optim", "save_retain_interval"], (lambda a: a.save, "--save")),
    "recompute_granularity": (lambda a: a.recompute_granularity == "full", "full; no attention scores are kept anyway"),
    "group_query_attention": (lambda a: a.num_query_groups, "--num-query-groups"),
    "muon_lr": (lambda a: a.optimizer == "muon", "--optimizer muon"),
    "muon_momentum": (lambda a: a.optimizer == "muon", "--optimizer muon"),
    **dict.fromkeys(
        ["lr_wsd_decay_style", "lr_wsd_decay_iters"], (lambda a: a.lr_decay_style == "WSD", "--lr-decay-style WSD")
    ),
    "min_lr": (lambda a: a.lr_decay_style != "constant", "a --lr-decay-style other than constant"),
    **dict.fromkeys(
        [
            "wandb_mode",
            "wandb_dir",
            "wandb_key",
            "wandb_host",
            "wandb_team",
            "wandb_project",
            "wandb_group",
            "wandb_run_name",
        ],
        (lambda a: a.use_wandb, "--use-wandb"),
    ),
    **dict.fromkeys(
        ["wandb_run_id", "wandb_random_suffix", "wandb_always_use_train_step"], (lambda a: a.use_wandb, "--use-wandb")
    ),
    **dict.fromkeys(
        ["tensorboard_dir", "tb_project_name", "tb_experiment_name"], (lambda a: a.use_tensorboard, "--use-tensorboard")
    ),
    **dict.fromkeys(["eval_prompt_data", "eval_config"], (lambda a: a.eval_interval, "--eval-interval")),
    **dict.fromkeys(
        ["sglang_mem_fraction_static", "sglang_config", "use_fault_tolerance"],
        (_runs_servers, "--rollout-backend sglang"),
    ),
    **dict.fromkeys(
        ["rollout_health_check_interval", "rollout_health_check_timeout"],
        (lambda a: a.use_fault_tolerance, "--use-fault-tolerance"),
    ),
    **dict.fromkeys(
        ["update_weight_transport", "update_weight_disk_dir", "update_weight_disk_keep_files"],
        (_runs_servers, "--rollout-backend sglang"),
    ),
    **dict.fromkeys(["ci_save_grad_norm", "ci_load_grad_norm"], (lambda a: not a.debug_rollout_only, "a trainer")),
    "check_weight_update_equal": (lambda a: not a.debug_rollout_only, "a trainer"),
    "train_env_vars": (lambda a: a.launcher == "ray", "--launcher ray; with another, export them"),
    "num_epoch": (lambda a: a.num_rollout is None, "no --num-rollout, which wins"),
}


def idle_flags(args: Args, given: frozenset[str]) -> Iterator[tuple[str, str]]:
    """(flag, why) for each flag that was given but has nothing to act on."""
    flags = all_flags(type(args))
    for name, (needed, what) in NEEDS.items():
        if name in given and not needed(args):
            flag = flags[name]
            yield flag.negative if flag.negative and getattr(args, name) is False else flag.option, f"needs {what}"
    if not _runs_servers(args):
        for name in args.sglang_overrides:
            yield "--sglang-" + name.replace("_", "-"), f"the {args.rollout_backend} engine runs, not SGLang"
    if args.debug_train_only:
        for name in sorted(given):
            if name.startswith(("eval_", "sglang_")) or name in (
                "colocate",
                "over_sampling_batch_size",
                "partial_rollout",
            ):
                yield "--" + name.replace("_", "-"), "no engine runs with --debug-train-only"
