"""Between what bounds a number means something."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from slimelite.arguments.args import Args

# fields -> the lowest value that makes sense
AT_LEAST: dict[str, float] = {
    **dict.fromkeys(["actor_num_nodes", "actor_num_gpus_per_node", "cpu_threads"], 1),
    **dict.fromkeys(["rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "micro_batch_size"], 1),
    **dict.fromkeys(
        [
            "num_steps_per_rollout",
            "update_weights_interval",
            "max_tokens_per_gpu",
            "log_probs_max_tokens_per_gpu",
            "num_epoch",
        ],
        1,
    ),
    **dict.fromkeys(["eval_interval", "save_interval", "ref_update_interval", "dp_replicate_size"], 1),
    **dict.fromkeys(["rollout_max_prompt_len", "rollout_max_context_len"], 1),
    **dict.fromkeys(["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"], 1),
    **dict.fromkeys(["kv_channels", "vocab_size", "max_position_embeddings"], 1),
    **dict.fromkeys(["sglang_max_running_requests", "sglang_context_length"], 1),
    **dict.fromkeys(["sglang_server_concurrency", "update_weight_buffer_size", "distributed_timeout_minutes"], 1),
    **dict.fromkeys(["num_rollout", "start_rollout_id", "max_weight_staleness", "lr", "min_lr", "weight_decay"], 0),
    **dict.fromkeys(
        ["clip_grad", "eps_clip", "eps_clip_high", "kl_coef", "kl_loss_coef", "lr_warmup_iters", "muon_lr"], 0
    ),
    **dict.fromkeys(["critic_lr", "critic_lr_warmup_iters", "num_critic_only_steps", "value_clip"], 0),
    **dict.fromkeys(["tis_clip_low", "mis_lower_bound", "mis_rejection_lower_bound", "opsm_delta"], 0),
    **dict.fromkeys(["generate_timeout", "rollout_health_check_interval", "rollout_health_check_timeout"], 1),
    **dict.fromkeys(["mis_upper_bound", "mis_rejection_upper_bound", "mis_veto_threshold"], 0),
    **dict.fromkeys(["adam_eps", "keep_dropped", "lr_warmup_init", "rollout_num_gpus"], 0),
    **dict.fromkeys(["lr_decay_iters", "lr_wsd_decay_iters"], 1),
    "ci_train_rollout_logprob_abs_diff_threshold": 0,
    "save_retain_interval": 1,
    "code_memory_mb": 64,
    **dict.fromkeys(["seed", "rollout_seed"], 0),
    "reward_model_batch_size": 1,
    "overlong_buffer_len": 1,
    "overlong_penalty_factor": 0,
}
# fields -> the highest; torch, numpy and SGLang take other seeds each, and engines add their number
AT_MOST = {"seed": 2**31 - 1, "rollout_seed": 2**31 - 1, "cpu_threads": 4096, "distributed_timeout_minutes": 525_600}
ABOVE_ZERO = ("code_timeout", "dpo_beta", "reward_timeout", "tis_clip")
IN_UNIT_INTERVAL = (
    "gamma",
    "lambd",
    "adam_beta1",
    "adam_beta2",
    "muon_momentum",
    "lr_warmup_fraction",
    "rollout_top_p",
    "sglang_mem_fraction_static",
)


# infinity is "no bound"
UNBOUNDED = {"clip_grad", "eps_clip", "eps_clip_high", "eps_clip_c", "tis_clip", "value_clip"}
UNBOUNDED |= {"mis_upper_bound", "mis_rejection_upper_bound"}


def bound_problems(args: Args) -> Iterator[str]:
    """A problem for each number that is outside the range in which it has a meaning, such as ``--lr -1``."""
    for field in fields(args):
        value = getattr(args, field.name)
        option = f"--{field.name.replace('_', '-')}"
        numbers = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int | float)]
        if any(math.isinf(v) for v in numbers if isinstance(v, float)) and field.name not in UNBOUNDED:
            yield f"{option} {value}: must be finite"
        if any(isinstance(v, int) and abs(v) >= 2**63 for v in numbers) and field.name not in AT_MOST:
            yield f"{option} {value}: must be below 2**63"
    for name, low in AT_LEAST.items():
        value = getattr(args, name)
        if value is not None and value < low:
            yield f"--{name.replace('_', '-')} {value}: must be at least {low}"
    for name, high in AT_MOST.items():
        value = getattr(args, name)
        if value is not None and value > high:
            yield f"--{name.replace('_', '-')} {value}: must be at most {high}"
    for name in ABOVE_ZERO:
        if getattr(args, name) <= 0:
            yield f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0"
    for name in IN_UNIT_INTERVAL:
        value = getattr(args, name)
        if value is not None and not 0 <= value <= 1:
            yield f"--{name.replace('_', '-')} {value}: must be between 0 and 1"
