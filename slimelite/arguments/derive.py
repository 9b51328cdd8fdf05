"""Fills in open fields after all sources are merged, and replaces some values. Each change records its reason."""

from __future__ import annotations

import time
from dataclasses import replace
from math import ceil
from pathlib import Path

from slimelite.algorithms.losses import CORRECTIONS, MODES
from slimelite.arguments.args import Args, Draft
from slimelite.arguments.documents import pack_documents, spend
from slimelite.arguments.engines import engine_places
from slimelite.arguments.evaluation import resolve_eval_datasets, seeks_best
from slimelite.arguments.flags import SEEDS
from slimelite.arguments.model import model_config_from_flags
from slimelite.arguments.rollout import EPISODE, PROGRAM
from slimelite.arguments.sources import Settings, load_yaml, read_mixture
from slimelite.arguments.torchrun import choose_launcher
from slimelite.arguments.training import INNER, read_adapter, words
from slimelite.engines.registry import ENGINES
from slimelite.environments.registry import TOTAL, known
from slimelite.models.checkpoints import (
    HUB_ID,
    OWN_CHECKPOINT,
    ROLLOUT_SEED,
    ROLLOUT_STATE,
    find_checkpoint,
    holds_model,
    read_json,
    why_no_model,
)
from slimelite.plan.devices import Machine
from slimelite.plan.memory import BESIDE_ENGINES, USABLE, left_behind, total, training_load

_ROLLOUTS = ("rollout.sglang_rollout.generate_rollout", "rollout.fully_async_rollout.generate_rollout_fully_async")
# slime's names of functions that run here by default. A flag with one of these names counts as not given
SLIME_DEFAULTS = {
    "rollout_function_path": _ROLLOUTS,
    "eval_function_path": _ROLLOUTS,
    "data_source_path": ("rollout.data_source.RolloutDataSourceWithBuffer",),
}
AHEAD = "; --async-rollout generates ahead of training"
OFFLINE_ROLLOUT = "slimelite.rollout.generate.offline_rollout"


def derive(args: Args, explicit: frozenset[str], machine: Machine, settings: Settings) -> Args:
    """``args`` with every open field filled in. If a field cannot be filled in, a problem is added to ``settings``.

    ``args.derivations`` has the values of presets already.
    """
    draft = Draft(args, explicit, machine, settings, list(args.derivations))
    _modes(draft)
    for name, value in read_mixture(args, settings).items():
        draft.set(name, value, f"the mixture {args.prompt_data[0]}")
    pack_documents(draft)
    if draft.args.agent_command is not None or draft.args.environment is not None:
        _environment(draft)
    choose_launcher(draft)
    _devices(draft)
    _engines(draft)
    if draft.args.sglang_config is not None and draft.args.job.servers:
        _engine_groups(draft, draft.args.sglang_config)
    _transport(draft)
    if args.load is not None and holds_model(args.load):
        _initial_weights(draft, args.load)
    if args.lora_rank or args.lora_adapter_path or args.lora_target_modules or args.lora_exclude_modules:
        _lora(draft)
    _model(draft)
    _batches(draft)
    spend(draft)
    _lengths(draft)
    if args.use_opd:
        _distillation(draft)
    _algorithm(draft)
    _correction(draft)
    _memory(draft)
    if args.load is not None:
        _checkpoint(draft, args.load)
    _rollout_seed(draft)
    _tracking(draft)
    draft.args = replace(draft.args, eval_datasets=resolve_eval_datasets(draft.args, settings))
    if draft.args.eval_datasets and seeks_best(draft.args):
        draft.default("early_stop_metric", f"eval/{draft.args.eval_datasets[0].name}", "the score of the first dataset")
    elif draft.args.eval_bpb and seeks_best(draft.args):
        draft.default("early_stop_metric", "eval/bpb", "--eval-bpb")
    _context(draft)
    return replace(
        draft.args,
        sglang_overrides=dict(settings.sglang),
        derivations=tuple(draft.derivations),
        notes=tuple(draft.notes),
    )


def _modes(draft: Draft) -> None:
    """Decide which parts of the loop run, which rollouts are dumped, and which plugins run."""
    args, job = draft.args, draft.args.job
    if args.train_backend == "megatron":
        draft.set("train_backend", "fsdp", "--train-backend megatron: FSDP2 trains the Hugging Face model instead")
    for name, paths in SLIME_DEFAULTS.items():
        root, _, path = str(getattr(args, name)).partition(".")
        if root in ("slime", "miles") and path in paths:
            draft.set(name, None, f"{root}.{path} is the default here{AHEAD if 'async' in path else ''}")
    if draft.args.rollout_function_path is not None and job.sampled:
        draft.default("eval_function_path", args.rollout_function_path, "as --rollout-function-path")
    if not job.sampled:
        why = f"--loss-type {args.loss_type}: nothing is generated"
        draft.default("rollout_function_path", OFFLINE_ROLLOUT, why)
    datasets = args.eval_prompt_data or args.eval_config or args.eval_tasks or args.eval_function_path
    if not job.sampled and job.syncs and (args.eval_interval is None or (args.eval_bpb and not datasets)):
        draft.set("debug_train_only", True, f"--loss-type {args.loss_type} needs engines only for eval datasets")
    if args.loss.scores:
        draft.set("token_stats", "none", f"--loss-type {args.loss_type} computes scores, not log-probs")
    if job.loss == "paired" and args.n_samples_per_prompt != 1:
        draft.set("n_samples_per_prompt", 1, f"--loss-type {args.loss_type}: each prompt has exactly one pair")
    if job.saved and job.engines:
        draft.set("debug_train_only", True, "--load-debug-rollout-data needs no engine")
    if not job.trains and args.colocate:
        draft.set("colocate", False, "--debug-rollout-only starts no trainer to share GPUs with")
    if args.save_rollouts in ("none", "0"):
        draft.set("token_stats", "none", f"--save-rollouts {args.save_rollouts}: token stats need saved samples")
    if args.dump_details:
        folder = args.dump_details.rstrip("/")
        draft.default("save_debug_rollout_data", f"{folder}/rollout_data/{{rollout_id}}.parquet", "--dump-details")
    template = draft.args.save_debug_rollout_data
    if template is not None and "{rollout_id" not in template:
        draft.notes.append(
            f"--save-debug-rollout-data {template} has no {{rollout_id}}: each rollout replaces the one before it, and "
            "evaluations are not written there"
        )


def _environment(draft: Draft) -> None:
    """Set up agents: episodes or programs make the responses. Prompts stay messages until a request renders them."""
    args = draft.args
    if args.agent_command is not None:
        draft.default("custom_generate_function_path", PROGRAM, "--agent-command: programs make the responses")
        if args.apply_chat_template:
            draft.set("apply_chat_template", False, "--agent-command: programs get messages")
    if args.environment is None:
        return
    draft.default("custom_generate_function_path", EPISODE, "--environment: each response is an episode")
    try:
        kinds = known(args.environment)
    except ValueError as error:
        draft.settings.problems.append(str(error))
        return
    draft.default("reward_key", TOTAL, "--environment: rewards may have named parts")
    if args.apply_chat_template:
        draft.set("apply_chat_template", False, "--environment: an episode renders its messages itself")
    if kinds and kinds[0].rows and not (args.prompt_data or args.data_source_path or args.job.saved):
        draft.set("prompt_data", [f"environment:{args.environment}"], "the environment has its own prompts")


def _devices(draft: Draft) -> None:
    """Set the device, the ranks of a node, and whether trainer and engines release memory for each other."""
    args, gpus = draft.args, draft.machine.gpus
    if args.device == "auto":
        reason = f"{gpus} GPU(s) {'of --plan-gpu' if args.plan_gpu else 'found'}" if gpus else "no GPU found"
        draft.set("device", "cuda" if gpus else "cpu", reason)
    cuda = draft.args.job.gpus
    draft.default("distributed_backend", "nccl" if cuda else "gloo", f"on {draft.args.device}")
    if not cuda and draft.args.distributed_backend == "nccl":
        draft.set("distributed_backend", "gloo", "nccl needs GPUs")
    per_node, why = 1, "one rank on a CPU"
    if cuda:
        taken = 0 if args.colocate or not args.job.engines else (args.rollout_num_gpus or 0)
        per_node, why = (
            max(1, min(8, gpus) - taken),
            f"{gpus} GPU(s) here" + (f", {taken} of them for engines" if taken else ""),
        )
    draft.default("actor_num_gpus_per_node", per_node, why)
    if args.offload:
        draft.default("offload_train", True, "--offload")
        draft.default("offload_rollout", True, "--offload")
    turns = cuda and draft.args.colocate
    for name in ("offload_train", "offload_rollout"):
        if not cuda and getattr(draft.args, name):
            draft.set(name, False, "on a CPU there is only host memory")
        draft.default(
            name, turns, "trainer and engines take turns on the GPUs" if turns else "nothing else needs the memory"
        )


def _engines(draft: Draft) -> None:
    """Set the kind and number of inference engines, and how often they get weights."""
    args = draft.args
    if not args.async_rollout and args.update_weights_interval > 1:
        draft.set("update_weights_interval", 1, "without --async-rollout, every rollout uses the newest weights")
    cuda = args.job.gpus
    repeats = ENGINES["sglang"].repeats_with(draft.settings.sglang)
    if args.rollout_backend == "auto":
        if args.rollout_external_engine_addrs:
            draft.set("rollout_backend", "sglang", "--rollout-external-engine-addrs")
        elif cuda and draft.machine.sglang and args.deterministic_mode and not repeats:
            draft.set("rollout_backend", "embedded", "SGLang would need --sglang-enable-deterministic-inference")
        elif cuda and draft.machine.sglang:
            planned_for = "--plan-gpu plans for a machine with SGLang, unless --rollout-backend embedded is given"
            draft.set("rollout_backend", "sglang", planned_for if args.plan_gpu else "GPUs, and SGLang is installed")
        else:
            draft.set("rollout_backend", "embedded", "SGLang is not installed" if cuda else "no GPU")
    ranks = args.training_ranks
    if servers := len(args.rollout_external_engine_addrs):
        draft.set("rollout_num_gpus", 0, "--rollout-external-engine-addrs: the run does not own the servers' GPUs")
        draft.set("num_engines", servers if args.job.engines else 0, "--rollout-external-engine-addrs")
        return
    if args.colocate:
        draft.default("rollout_num_gpus", ranks, "--colocate: as many as for training")
        if cuda and draft.args.job.servers and draft.args.rollout_num_gpus > ranks:
            draft.set("rollout_num_gpus", ranks, f"--colocate: the engines share the GPUs of {ranks} training rank(s)")
    elif not args.job.engines:
        draft.default("rollout_num_gpus", 0, "no engine runs")
    elif not cuda:
        draft.default("rollout_num_gpus", args.rollout_num_gpus_per_engine, "one engine on a CPU")
    elif not args.job.trains:
        draft.default("rollout_num_gpus", ranks, "--debug-rollout-only: every GPU")
    elif args.rollout_num_gpus is None:
        none = "" if draft.machine.gpus else "; this machine has no GPU, so use --device cpu"
        draft.complain(
            "--rollout-num-gpus",
            f"is missing: give the number of GPUs for inference, or share those of training with --colocate{none}",
        )
        draft.args = replace(draft.args, rollout_num_gpus=ranks)
    total, width = draft.args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if args.sglang_config and draft.args.job.servers:
        return  # its groups define the number and the width of the engines
    if width < 1 or total % width:
        draft.complain("--rollout-num-gpus", f"{total} is not a multiple of --rollout-num-gpus-per-engine {width}")
        return
    draft.set("num_engines", total // width if args.job.engines else 0, f"{total} GPU(s), {width} for each engine")


def _engine_groups(draft: Draft, path: str) -> None:
    """Set a place for each engine of ``--sglang-config``. Unsupported settings become problems."""
    args, option = draft.args, "--sglang-config"
    content = load_yaml(path, option, draft.settings)
    if content is None:
        return
    gpus, width = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    try:
        places = tuple(engine_places(content, args.hf_checkpoint, gpus, width))
    except ValueError as error:
        draft.complain(option, f"{path}: {error}")
        return
    draft.set("engine_places", places, f"{option} {path}")
    draft.set("num_engines", len(places) if args.job.engines else 0, option)


def _transport(draft: Draft) -> None:
    """Choose how weights reach engines that are servers. The choice depends on the place of the servers.

    On a CPU, gloo is many times faster than HTTP (docs/benchmarks.md). External servers may be on any machine, so their
    default is HTTP.
    """
    args, job = draft.args, draft.args.job
    if not job.servers:
        if not job.gpus and job.syncs and "update_weight_buffer_size" not in draft.explicit:
            # The kernel has to clear a larger buffer anew for each sync. The training process keeps buffers of up to
            # 32 MiB (`base.heap`). A bucket ends with the tensor that fills it.
            size = (16 if job.local else 64) * 1024**2
            draft.set("update_weight_buffer_size", size, "larger buckets save no requests on a CPU")
        return
    shared = args.colocate and job.gpus
    if args.update_weight_transport == "nccl" and shared:
        draft.set("update_weight_transport", "ipc", "NCCL allows one rank per GPU, but trainer and engines share GPUs")
    elif args.update_weight_disk_dir:
        draft.default("update_weight_transport", "disk", "--update-weight-disk-dir")
    elif args.rollout_external_engine_addrs:
        draft.default("update_weight_transport", "http", "external servers may be on any machine")
    elif shared:
        draft.default("update_weight_transport", "ipc", "trainer and engines share their GPUs")
    else:
        draft.default("update_weight_transport", "nccl", "NCCL on GPUs, gloo on a CPU")


def _initial_weights(draft: Draft, load: str) -> None:
    """Take the weights from the Hugging Face folder ``--load``. ``--hf-checkpoint`` keeps tokenizer and reference."""
    if (named := draft.args.hf_checkpoint) is not None:
        draft.default("tokenizer", named, "as --hf-checkpoint")
        draft.default("ref_load", named, "as --hf-checkpoint")
    draft.set("hf_checkpoint", load, "--load is a Hugging Face model: training starts from its weights")


def _lora(draft: Draft) -> None:
    """Set the modules that get an adapter, and the settings from the adapter of ``--lora-adapter-path``."""
    args = draft.args
    for name, modules in (("lora_targets", args.lora_target_modules), ("lora_excluded", args.lora_exclude_modules)):
        if modules:
            draft.set(name, words(modules), "--lora-target-modules and --lora-exclude-modules")
    if args.lora_adapter_path is not None and args.job.trains:
        try:
            adapter = read_adapter(args.lora_adapter_path)
        except ValueError as error:
            draft.complain("--lora-adapter-path", str(error))
            return
        targets = {name: adapter.pop(name) for name in ("lora_targets", "lora_excluded")}
        for name, value in adapter.items():
            flag, option = getattr(args, name), "--" + name.replace("_", "-")
            if name in draft.explicit and flag != value and {flag, value} != {"lora", "canonical_lora"}:
                draft.complain(option, f"{flag}: the adapter of --lora-adapter-path has {value}; leave the flag out")
            draft.set(name, value, "--lora-adapter-path")
        if not (args.lora_target_modules or args.lora_exclude_modules):
            for name, value in targets.items():
                draft.set(name, value, "--lora-adapter-path")
    if not draft.args.lora_rank:
        return
    own = args.engine_kind.adapters and not (args.rollout_external_engine_addrs or args.load_in_4bit)
    alone = own and set(draft.args.lora_modules) <= set(INNER)
    draft.default("lora_sync", "adapter" if alone else "merged", "the engines can receive this form")
    if args.lora_dropout:
        draft.notes.append(
            f"--lora-dropout {args.lora_dropout}: the policy in training differs from the policy that generated the "
            "responses. Only the policy without dropout is compared with the reference and the engines. Use 0 in RL"
        )


def _model(draft: Draft) -> None:
    """Tokenizer and reference model."""
    args = draft.args
    if args.hf_checkpoint:
        draft.default("tokenizer", args.hf_checkpoint, "as --hf-checkpoint")
    if not args.hf_checkpoint or (
        Path(args.hf_checkpoint).is_dir() and not (Path(args.hf_checkpoint) / "config.json").is_file()
    ):
        _new_model(draft)
    compared = {
        "--kl-coef": args.kl_coef != 0,
        "--kl-loss-coef": args.use_kl_loss and args.kl_loss_coef != 0,
        "--log-ref-kl": args.log_ref_kl,
    }
    wanted = [option for option, on in compared.items() if on and args.job.sampled]
    if wanted:
        draft.set("use_reference", True, f"{' and '.join(wanted)} need{'s' * (len(wanted) == 1)} a reference model")
    elif args.loss.compares:
        draft.set("use_reference", True, f"--loss-type {args.loss_type} needs a reference model")
    else:
        draft.set("use_reference", False, "no flag needs a reference model, so none is loaded")
    if args.use_kl_loss and args.kl_loss_coef == 0 and args.job.sampled and not args.log_ref_kl:
        draft.notes.append(
            "--use-kl-loss with --kl-loss-coef 0 loads no reference model; --log-ref-kl logs the KL anyway"
        )
    if args.job.loss != "policy" and "--kl-loss-coef" in wanted:
        draft.notes.append(f"--loss-type {args.loss_type} adds no KL: your function must add it, from inputs.ref")
    if args.ref_load is None and draft.args.model_config is None:
        draft.default("ref_load", args.hf_checkpoint, "as --hf-checkpoint")
    elif args.ref_load is not None and (problem := _not_hugging_face(args.ref_load)) is not None:
        what = f"--ref-load {args.ref_load} {problem}"
        if wanted and problem == OWN_CHECKPOINT:
            draft.complain("--ref-load", f"{args.ref_load}: {problem}; name a folder that --save-hf wrote")
        draft.set("ref_load", args.hf_checkpoint, f"{what}: --hf-checkpoint is the reference")
        draft.notes.append(f"{what}; the reference is --hf-checkpoint {args.hf_checkpoint}")


def _new_model(draft: Draft) -> None:
    """Define the model by the architecture flags, because there is no config.json."""
    args = draft.args
    if not args.describes_model:
        where = f"{path}: {why_no_model(path)}; name" if (path := args.hf_checkpoint) else "is missing: name"
        draft.complain("--hf-checkpoint", f"{where} a model, or define one with --num-layers ... and --tokenizer")
        return
    try:
        draft.set("model_config", model_config_from_flags(args), "the architecture flags define a new model")
    except ValueError as error:
        draft.complain("--num-layers", str(error))
    if args.tokenizer is None:
        draft.complain("--tokenizer", "is missing: a new model needs a tokenizer")


def _not_hugging_face(path: str) -> str | None:
    """Why ``path`` is not a Hugging Face model, or None."""
    if Path(path).is_dir():
        return why_no_model(path)
    is_hub_id = HUB_ID.fullmatch(path) and not path.startswith((".", "~")) and "torch_dist" not in path
    return None if is_hub_id else "is not there"


def _batches(draft: Draft) -> None:
    """Set the numbers of samples, optimizer steps and micro-batches."""
    args = draft.args
    if not args.rollout_batch_size:
        if args.rollout_batch_size is None:
            draft.complain("--rollout-batch-size", "is missing: give the number of prompts per rollout")
        return
    draft.default("over_sampling_batch_size", args.rollout_batch_size, "as --rollout-batch-size")
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    pairs = args.job.loss == "paired"
    counted = "pairs" if pairs else "samples"
    shape = "" if pairs else f"{args.rollout_batch_size} prompts x {args.n_samples_per_prompt} responses = "
    total = f"{shape}{samples} {counted}"
    steps, size = args.num_steps_per_rollout, args.global_batch_size
    if size is None:
        steps = steps or 1
        size = ceil(samples / max(steps, 1))
        draft.set("global_batch_size", size, f"{total} in {steps} step(s)")
    if size < 1:
        return
    fitting = ceil(samples / size)
    if steps is not None and fitting != steps:
        draft.complain("--num-steps-per-rollout", f"{steps}: {total} in batches of {size} make {fitting} steps")
    draft.default("num_steps_per_rollout", fitting, f"{total} / --global-batch-size {size}")
    if last := samples % size:
        step = "the only step" if fitting == 1 else f"the last of {fitting} steps"
        draft.notes.append(
            f"{total}: {step} of each rollout has {last} {counted} instead of {size}, and averages its loss over {last}"
        )
    if args.use_dynamic_batch_size:
        draft.default("log_probs_max_tokens_per_gpu", args.max_tokens_per_gpu, "as --max-tokens-per-gpu")


def _lengths(draft: Draft) -> None:
    """Set the prompt and response lengths."""
    args = draft.args
    if args.rollout_max_context_len is not None:
        draft.default("rollout_max_prompt_len", args.rollout_max_context_len - 1, "--rollout-max-context-len minus 1")
    if args.rollout_max_response_len is None and (args.rollout_function_path or not args.job.engines):
        draft.set("rollout_max_response_len", args.rollout_max_context_len or 0, "no engine generates in this run")


def _context(draft: Draft) -> None:
    """Set the engines' context: the longest context of training rollouts and evaluations."""
    longest = draft.args.rollout_max_context_len
    if longest is not None:
        longest = max([longest, *(d.max_context_len or 0 for d in draft.args.eval_datasets)])
        draft.default("sglang_context_length", longest, "the longest context of rollouts and evaluations")


def _algorithm(draft: Draft) -> None:
    """Set the clip bounds, whitening and reduction."""
    args = draft.args
    draft.default("eps_clip_high", args.eps_clip, "as --eps-clip")
    if args.estimator.whitens and not args.normalize_advantages:
        draft.set("normalize_advantages", True, f"part of the definition of {args.advantage_estimator}")
        draft.notes.append(f"--advantage-estimator {args.advantage_estimator} implies --normalize-advantages")
    draft.default("critic_lr", args.lr, "as --lr")
    if args.estimator.needs_critic and args.job.sampled:
        draft.set("use_critic", True, f"--advantage-estimator {args.advantage_estimator}")
        if count := args.num_critic_only_steps:
            draft.notes.append(f"rollouts 1 to {count} train only the critic: the policy does not change")
    if args.calculate_per_token_loss and "loss_aggregation" not in draft.explicit:
        draft.set("loss_aggregation", "token", "--calculate-per-token-loss")
    if args.kl_coef and "kl_loss_type" in draft.explicit:
        draft.set("kl_reward_type", args.kl_loss_type, "--kl-loss-type was given")
    if args.estimator.open_below and args.eps_clip < 1:
        draft.notes.append(
            f"{args.advantage_estimator} with --eps-clip {args.eps_clip} also clips from below; the paper of "
            f"{args.advantage_estimator} uses --eps-clip 1.0"
        )
    if args.use_opsm and args.num_steps_per_rollout == 1 and not args.use_rollout_logprobs:
        draft.notes.append(
            "--use-opsm with one optimizer step per rollout drops no response, because the old log-probs come from the "
            "same weights; give --num-steps-per-rollout 2 or more, or --use-rollout-logprobs"
        )
    if args.eval_reward_key is None and args.reward_key is not None:
        draft.set("eval_reward_key", args.reward_key, "as --reward-key")
    if args.optimizer_cpu_offload and not args.fsdp_cpu_offload:
        draft.set("fsdp_cpu_offload", True, "--optimizer-cpu-offload")


def _memory(draft: Draft) -> None:
    """Decide whether activations are recomputed, and when ranks add up their gradients."""
    args = draft.args
    if args.recompute_granularity is not None:
        draft.default("gradient_checkpointing", True, f"--recompute-granularity {args.recompute_granularity}")
    if not (args.job.gpus and args.job.trains):
        draft.default("gradient_checkpointing", False, "nothing is trained on a GPU")
        return
    load, here = training_load(args), draft.machine.gpu_bytes
    if isinstance(load, str) or here is None or load.shapes.router:
        unknown = load if isinstance(load, str) else "the GPUs' memory is not known here"
        if not isinstance(load, str) and load.shapes.router:
            unknown = "the memory that experts keep for the backward pass is not known"
        draft.default("gradient_checkpointing", True, f"{unknown}, and a GPU may be too small without checkpointing")
        draft.set("reduce_once_a_step", False, f"{unknown}, and whole gradients may not fit")
        return

    def needs(*, checkpointing: bool, whole_grads: bool = False) -> float:
        return total(replace(load, checkpointing=checkpointing, whole_grads=whole_grads).train())

    usable = USABLE * here * (BESIDE_ENGINES if args.colocate and not args.offload_rollout else 1)
    if args.colocate and args.job.servers:
        usable -= left_behind(args.rollout_num_gpus_per_engine)
    plain, saving = needs(checkpointing=False), needs(checkpointing=True)
    has = f"a GPU has {usable / 1e9:.0f} GB for training"
    reason = f"without checkpointing, a micro-batch of {load.tokens} tokens takes about {plain / 1e9:.0f} GB"
    if plain > usable:
        reason += f", with checkpointing {saving / 1e9:.0f} GB"
    draft.default("gradient_checkpointing", plain > usable, f"{reason}; {has}")
    chosen = draft.args.gradient_checkpointing
    if needs(checkpointing=chosen) > usable:
        draft.notes.append(
            f"training takes about {needs(checkpointing=chosen) / 1e9:.0f} GB of a GPU, but {has}: it may run out of "
            f"memory. {'A' if chosen else '--gradient-checkpointing, a'} lower --max-tokens-per-gpu, more GPUs or "
            "--fsdp-cpu-offload would help"
        )
    whole = needs(checkpointing=chosen, whole_grads=True)
    reason = f"with whole gradients on every rank a step takes about {whole / 1e9:.0f} GB; {has}"
    ranks = args.training_ranks
    once = ranks > 1 and whole <= usable
    draft.set("reduce_once_a_step", once, reason if ranks > 1 else "with one rank there are no gradients to add up")


def _checkpoint(draft: Draft, load: str) -> None:
    """Find the checkpoint to resume from, if there is one."""
    args = draft.args
    if holds_model(load) and args.ckpt_step is None:
        return
    try:
        own = args.save is not None and Path(load).resolve() == Path(args.save).resolve()
        folder, note = find_checkpoint(load, args.ckpt_step, fallback=args.load_fallback, own=own)
    except ValueError as error:
        draft.complain("--load", str(error))
        return
    if folder is None:
        note += ": a new run begins" + " from --hf-checkpoint" * (args.hf_checkpoint is not None)
    if note:
        draft.notes.append(f"--load {load}: {note}")
    newest = "the newest under --load" if args.ckpt_step is None else "--ckpt-step"
    draft.set("resume_directory", None if folder is None else str(folder), note or newest)


def _rollout_seed(draft: Draft) -> None:
    """Set the rollout seed. Runs with different --seed sample differently, and a resumed run keeps its seed."""
    args = draft.args
    if "rollout_seed" in draft.explicit:
        return
    if args.resume_directory is not None and not args.finetune:
        saved = read_json(Path(args.resume_directory) / ROLLOUT_STATE)[ROLLOUT_SEED]
        if saved != args.rollout_seed or "seed" in draft.explicit:
            draft.set("rollout_seed", saved, "from the checkpoint: a resumed run keeps its seed")
    elif "seed" in draft.explicit and args.seed in SEEDS:
        draft.set("rollout_seed", args.seed, "as --seed")


def _tracking(draft: Draft) -> None:
    """Set the run folder. Its default name has no characters that a shell would interpret."""
    args = draft.args
    name = Path(args.hf_checkpoint or args.tokenizer or "model").name
    if args.prompt_data:
        path = Path(args.prompt_data[0].partition("@[")[0].removeprefix("environment:"))
        name += f" {path.parent.name if path.stem in ('train', 'test', 'data') else path.stem}"
    name = "-".join("".join(c if c.isalnum() or c in "._+" else " " for c in name).split())[:120]
    draft.default("run_dir", f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}", "from the model, the data and the time")


def _correction(draft: Draft) -> None:
    """Choose ``--correction`` like slime's flags, and its bounds. By default, the lower bound is 1 / the upper one."""
    args = draft.args
    if args.custom_tis_function_path is not None:
        _resolve_plugin(draft, args.custom_tis_function_path)
    elif args.use_tis and args.correction == "none" and "correction" not in draft.explicit:
        draft.set("correction", "tis", "--use-tis")
    if draft.args.correction != "mis":
        return
    if args.use_rs:
        draft.default("mis_rejection_level", "token", "--use-rs")
    elif args.use_rs is False and args.mis_rejection_level is not None:
        draft.set("mis_rejection_level", None, "--no-use-rs")
    args = draft.args
    if "mis_lower_bound" in MODES[args.mis_mode].reads:
        draft.default("mis_lower_bound", _inverse(args.mis_upper_bound), "1 / --mis-upper-bound")
    if args.mis_rejection_level is not None:
        if args.mis_rejection_upper_bound is None and "mis_lower_bound" in draft.explicit:
            draft.default("mis_rejection_lower_bound", args.mis_lower_bound, "as --mis-lower-bound")
        draft.default("mis_rejection_upper_bound", args.mis_upper_bound, "as --mis-upper-bound")
        upper = draft.args.mis_rejection_upper_bound
        draft.default("mis_rejection_lower_bound", _inverse(upper), "1 / --mis-rejection-upper-bound")


def _inverse(upper: float | None) -> float:
    return 1 / upper if upper is not None and upper > 0 else 0.0


def _resolve_plugin(draft: Draft, path: str) -> None:
    name = path.replace("/", ".").replace(".py:", ".").replace(":", ".")
    name = name.replace("examples.infra_features.", "examples.")  # miles keeps slime's file there
    ours = next((record.name for record in CORRECTIONS.values() if record.slime == name), None)
    if "correction" not in draft.explicit:
        draft.set("correction", ours or "custom", "--custom-tis-function-path")
    if ours == draft.args.correction:
        draft.set("custom_tis_function_path", None, f"slime's function is --correction {ours}")
        if draft.args.use_tis and ours != "tis":
            draft.set("use_tis", False, f"--correction {ours} replaces slime's switch")


def _distillation(draft: Draft) -> None:
    """Replace slime's name for a teacher in the trainer, and set the reward rule of a run without a task reward."""
    args = draft.args
    if args.opd_type == "megatron":
        draft.set("opd_type", "trainer", "--opd-type megatron: the teacher is a Hugging Face model beside the trainer")
    if args.rm_type is None and args.custom_rm_path is None:
        draft.set("rm_type", "zero", "--use-opd without a reward: pure distillation")
    elif args.custom_rm_path is None and args.label_key is None:
        reason = "--use-opd without --label-key: a reward that needs a label is 0, so only the teacher matters"
        draft.set("unlabelled_is_zero", True, reason)
    if args.n_samples_per_prompt == 1 and args.rewards_normalization and args.estimator.group is not None:
        draft.notes.append(
            f"--use-opd with --n-samples-per-prompt 1: {args.advantage_estimator} has no other response to compare "
            "with, so the reward is only reported, and the policy learns only from the teacher"
        )
