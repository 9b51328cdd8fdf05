"""The first lines of a run: what trains on what, where, and how the batch sizes fit together."""

from __future__ import annotations

from slimelite.arguments import Args
from slimelite.arguments.preflight import plugin_paths


def run_facts(args: Args) -> dict[str, str]:
    """Name -> value, in the order to show; ``args`` as `complete_args` leaves them."""
    facts = {
        "model": args.hf_checkpoint or "new, random weights",
        "data": ", ".join(args.prompt_data) or str(args.load_debug_rollout_data or args.data_source_path or "none"),
        "eval": ", ".join(f"{d.name} ({d.path})" for d in args.eval_datasets),
        "method": _method(args),
        "plugins": ", ".join(
            f"{flag} {path}" for flag, path in plugin_paths(args) if not path.startswith("slimelite.")
        ),
        "device": _device(args),
        "batch": batch_identity(args),
        "rollouts": f"{args.num_rollout}" + (f", going on at {args.start_rollout_id}" if args.start_rollout_id else ""),
    }
    return {name: value for name, value in facts.items() if value}


def batch_identity(args: Args) -> str:
    """``32 prompts x 8 samples = 256 = 2 steps of 100 + 1 of 56``."""
    total = args.rollout_batch_size * args.n_samples_per_prompt
    full, rest = divmod(total, args.global_batch_size)
    steps = [f"{full} step{'s' if full > 1 else ''} of {args.global_batch_size}"] if full else []
    steps += [f"1 of {rest}" if full else f"1 step of {rest}"] if rest else []
    samples = f"{args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples = {total}"
    return f"{f'{total} pairs' if args.loss_type == 'dpo_loss' else samples} = {' + '.join(steps)}"


def _device(args: Args) -> str:
    ranks = args.actor_num_nodes * args.actor_num_gpus_per_node
    parts: list[str] = [args.device]
    if not args.debug_rollout_only:
        parts.append(f"{ranks} training rank{'s' if ranks > 1 else ''}")
    if not args.debug_train_only:
        engines = args.num_engines
        parts.append(f"{engines} {args.rollout_backend} engine{'s' if engines > 1 else ''}")
    parts.append("in one process" if args.launcher == "local" else "Ray")
    return ", ".join(parts)


def _method(args: Args) -> str:
    name = args.loss_type.removesuffix("_loss") if args.supervised else args.advantage_estimator
    critic = f", critic lr {args.critic_lr:g}" if args.use_critic else ""
    return f"{name}, {args.optimizer} lr {args.lr:g}{critic}{_kl(args)}"


def _kl(args: Args) -> str:
    if args.supervised:
        return ""
    if args.use_kl_loss and args.kl_loss_coef:
        return f", KL loss {args.kl_loss_coef:g} ({args.kl_loss_type})"
    return f", KL reward {args.kl_coef:g}" if args.kl_coef else ""
