"""Checks of the complete arguments: one line for each problem, and a list of the given flags that have no effect."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from slimelite.algorithms.losses import CORRECTIONS, KL_KINDS, LOSSES
from slimelite.arguments.algorithm import CorrectionArgs, DistillationArgs
from slimelite.arguments.args import Args
from slimelite.arguments.conditions import SGLANG
from slimelite.arguments.evaluation import CHOOSE, CONTINUE
from slimelite.arguments.flags import all_flags
from slimelite.arguments.rollout import EPISODE, PROGRAM, RewardArgs, RolloutArgs
from slimelite.arguments.sources import SIMILAR
from slimelite.engines.params import SamplingParams
from slimelite.engines.registry import DRAFTS, NO_DRAFTS_BY_DISK
from slimelite.rewards.rules import RULES

# SGLang's default of --sglang-sampling-mask-max-tokens
SGLANG_MOST_KEPT = 4096


def validate(args: Args) -> list[str]:
    """Every problem of complete arguments, one line each."""
    checks = (
        _flags,
        _modes,
        _workers,
        _engines,
        _weight_sync,
        _data,
        _loss,
        _correction,
        *([_distillation] if args.use_opd else []),
        _rewards,
        _training,
        _evaluation,
    )
    problems: list[str] = []
    for check in checks:
        problems += check(args)
    return problems


def without_effect(args: Args, explicit: frozenset[str]) -> Iterator[tuple[str, str]]:
    """(flag, reason) for each flag that was given but has no effect, such as --mis-level without --correction mis.

    A flag without effect is not an error. The start of the run lists such flags under "no effect here".
    """
    for flag in all_flags(type(args)).values():
        if flag.name in explicit and flag.needs and (missing := flag.needs.missing(args)):
            off = flag.negative if getattr(args, flag.name) is False else None
            yield off or flag.option, f"needs {missing}"
    if missing := SGLANG.missing(args):
        for name in args.sglang_overrides:
            yield "--sglang-" + name.replace("_", "-"), f"needs {missing}"


def _flags(args: Args) -> Iterator[str]:
    """Numbers out of bounds, flags whose strict condition does not hold, and required flags that are missing."""
    if args.stages:
        yield "--stages can only be given on the command line of train.py, not in a file of flags"
    for flag in all_flags(type(args)).values():
        value = getattr(args, flag.name)
        if wrong := flag.wrong_number(value):
            yield f"{flag.option} {value}: {wrong}"
        if flag.needs and value != flag.default and (missing := flag.needs.missing(args, strict=True)):
            yield f"{flag.option} needs {missing}"
        if flag.needs and flag.required and value is None and flag.needs.conditions[-1].holds(args):
            yield f"{flag.needs.conditions[-1].words} needs {flag.option}"


def _modes(args: Args) -> Iterator[str]:
    if args.max_restarts and (args.finetune or args.ckpt_step is not None):
        yield (
            "--max-restarts would resume from the newest checkpoint in --save, but --finetune and --ckpt-step ignore "
            "that checkpoint: give the model as --hf-checkpoint, or start the run first without --max-restarts"
        )
    if args.max_restarts and args.no_save_optim and not args.no_load_optim:
        yield (
            "--max-restarts cannot resume the optimizer, because --no-save-optim leaves it out of each checkpoint: "
            "remove --no-save-optim, or add --no-load-optim to begin each restart with a fresh optimizer"
        )
    job = args.job
    if not (job.trains or job.engines):
        other = "--load-debug-rollout-data" if job.saved else "--debug-train-only"
        yield f"--debug-rollout-only and {other} leave nothing to run; choose one"
    if args.num_rollout is None and args.num_epoch is None:
        yield (
            "--num-rollout is missing: give the number of rollouts of the run, or with --num-epoch the number of "
            "passes over the prompts"
        )
    elif args.num_rollout is None and job.saved:
        yield "--num-epoch with --load-debug-rollout-data: saved rollouts have no epochs; give --num-rollout"
    prompts = args.prompt_data or job.saved or args.num_rollout == 0
    if not prompts and args.rollout_global_dataset:
        yield (
            "--prompt-data is missing: name the files with the prompts (or train on saved rollouts with "
            "--load-debug-rollout-data)"
        )
    if args.curriculum_threshold is not None and (args.prompt_data_weights or not args.rollout_global_dataset):
        yield "--curriculum-threshold needs a single data set, not a mixture: remove --prompt-data-weights"
    rule = RULES[args.rm_type] if args.rm_type and args.rm_type in RULES and not args.custom_rm_path else None
    if (args.curriculum_threshold or 0) > 1 and rule is not None and rule.example is not None:
        yield (
            f"--curriculum-threshold {args.curriculum_threshold}: --rm-type {rule.name} gives a right answer the "
            "reward 1, so no task would ever reach its next level; use a threshold from 0 to 1"
        )
    elsewhere = args.data_source_path or args.rollout_function_path or args.environment
    if not args.rollout_global_dataset and not elsewhere:
        yield "--disable-rollout-global-dataset needs a --data-source-path or --rollout-function-path with prompts"
    ours = {"--environment": (args.environment, EPISODE), "--agent-command": (args.agent_command, PROGRAM)}
    for flag, (value, function) in ours.items():
        if value and args.custom_generate_function_path != function:
            yield f"{flag} and --custom-generate-function-path both make the responses; choose one"
    if args.agent_command and args.agent_network == "none" and (args.agent_sandbox or "none") != "none":
        yield (
            "--agent-network none: the programs of --agent-command could not reach the model; use --agent-network "
            "loopback"
        )
    if not job.engines and job.sampled and not (job.saved or args.rollout_function_path):
        yield (
            "--debug-train-only has nothing to train on: give --load-debug-rollout-data, or a --loss-type that "
            "reads its responses from the data, such as sft_loss"
        )
    if not (job.trains or job.sampled):
        yield f"--debug-rollout-only with --loss-type {args.loss_type}: this loss generates no rollouts; choose one"
    if args.save_rollouts not in ("all", "none") and not re.fullmatch(r"\d{1,9}", args.save_rollouts):
        yield f"--save-rollouts {args.save_rollouts}: must be a number of rollouts, all or none"
    if args.use_pytorch_profiler and args.num_rollout is not None:
        chosen = args.profiled_rollouts
        if not any(0 <= rollout < args.num_rollout for rollout in chosen):
            which = ", ".join(map(str, chosen[:4])) + ", …" * (len(chosen) > 4) or "none"
            yield (
                f"--use-pytorch-profiler profiles {which} of the rollouts 0 to {args.num_rollout - 1}: name the "
                "rollouts to profile, as in --profile-rollouts 0"
            )
    # an error in one of these flags is already reported
    named = args.eval_config or args.eval_prompt_data or "".join(args.eval_tasks).strip(",")
    if args.eval_interval is not None and job.engines and not (named or args.eval_bpb):
        yield "--eval-interval needs --eval-prompt-data, --eval-config, --eval-tasks or --eval-bpb"


def _workers(args: RolloutArgs) -> Iterator[str]:
    for name, text in args.train_env_vars.items():
        if not name or "=" in name or isinstance(text, bool) or not isinstance(text, str | int | float):
            yield (
                f"--train-env-vars: {name!r}: {text!r} is not a variable: the name must have no =, and the value "
                "must be a text or a number"
            )
    if args.async_rollout and args.colocate:
        yield (
            "--async-rollout with --colocate: engines that share the trainer's devices cannot generate while it "
            "trains; choose one"
        )
    if args.async_rollout and (args.offload_rollout or args.offload_train):
        yield (
            "--async-rollout with --offload: engines and trainer run at the same time, so neither can release its "
            "memory; choose one"
        )
    oldest = args.update_weights_interval
    if args.async_rollout and args.max_weight_staleness is not None and args.max_weight_staleness < oldest:
        yield (
            f"--max-weight-staleness {args.max_weight_staleness}: --async-rollout trains on samples up to {oldest} "
            f"update(s) old (--update-weights-interval); allow {oldest} or more"
        )
    ranks = args.training_ranks
    if args.job.local and args.job.trains and ranks > 1:
        yield f"--launcher local runs one process: {ranks} training ranks need --launcher ray"
    if args.job.local and args.job.engines == "own" and args.num_engines > 1:
        yield f"--launcher local runs one process: {args.num_engines} engines need --launcher ray"


def _engines(args: Args) -> Iterator[str]:
    if args.rollout_temperature == 0:
        yield (
            "--rollout-temperature 0.0: must be above 0, because training divides the logits by it, and all responses "
            "of a group would be equal. For greedy evaluation, use --eval-temperature 0"
        )
    external, engine = args.rollout_external_engine_addrs, args.engine_kind
    if external and not engine.server:
        yield (
            f"--rollout-external-engine-addrs names SGLang servers, which --rollout-backend {engine.name} cannot use; "
            "choose one"
        )
    if external and args.colocate:
        yield (
            "--rollout-external-engine-addrs with --colocate: external servers cannot share the trainer's devices; "
            "choose one"
        )
    if args.deterministic_mode and not engine.repeats_with(args.sglang_overrides):
        what = f"--deterministic-mode with --rollout-backend {engine.name}"
        if isinstance(engine.repeats, str):
            yield f"{what} needs --sglang-{engine.repeats.replace('_', '-')} (on GPUs)"
        else:
            yield f"{what}: the samples of this engine are not reproducible; use embedded"
    if args.sglang_overrides.get("dp_size", 1) > 1 and not args.sglang_overrides.get("enable_dp_attention"):
        yield (
            "--sglang-dp-size: SGLang can update the weights of its replicas only with --sglang-enable-dp-attention; "
            "to get more engines, raise --rollout-num-gpus"
        )
    widest = max((place.width for place in args.engine_places), default=args.rollout_num_gpus_per_engine)
    if engine.server and not args.job.gpus and widest > 1:
        yield f"--rollout-num-gpus-per-engine {widest}: on a CPU, a server is one process; leave the flag at 1"
    if args.sglang_config and external:
        yield (
            "--sglang-config starts servers, and --rollout-external-engine-addrs names servers that are already "
            "running; choose one"
        )
    if args.job.engines == "own" and args.rollout_num_gpus == 0:
        yield "--rollout-num-gpus 0 leaves no engine to generate responses; give at least 1"
    if not engine.wide and (size := args.rollout_num_gpus_per_engine) > 1:
        yield f"--rollout-num-gpus-per-engine {size}: the {engine.name} engine runs on only one device; give 1" + (
            "" if args.job.gpus else ", or plan for GPUs with --dry-run --plan-gpu h100:8"
        )
    shares = args.job.gpus and (args.colocate or args.job.local)
    if not engine.releases_memory and (args.offload_rollout or shares):
        yield (
            f"--rollout-backend {engine.name} cannot release its memory, so it does not work with --colocate, "
            "--offload-rollout or --launcher local on GPUs"
        )


def _weight_sync(args: Args) -> Iterator[str]:
    way = args.update_weight_transport
    if way not in (None, "disk") and args.update_weight_disk_dir:
        yield (
            f"--update-weight-disk-dir with --update-weight-transport {way}: the folder is only for "
            "--update-weight-transport disk"
        )
    if way == "ipc" and not args.colocate:
        yield "--update-weight-transport ipc is for engines on the trainer's GPUs: add --colocate, or use nccl"
    ranks, job = args.training_ranks, args.job
    shared = job.servers and args.colocate and way == "ipc"
    if shared and job.syncs and args.rollout_num_gpus > ranks:
        yield (
            f"--rollout-num-gpus {args.rollout_num_gpus} with --colocate: the engines share the GPUs of {ranks} "
            f"training rank(s); give {ranks}, or leave the flag out"
        )
    if job.syncs and job.servers and job.engines == "own" and not args.sends_adapter:
        every = [args.sglang_overrides, *(place.overrides for place in args.engine_places)]
        yield from dict.fromkeys(problem for options in every for problem in _quantized(options))
        if way == "disk" and (drafts := next((algorithm for each in every if (algorithm := each.get(DRAFTS))), None)):
            yield f"--sglang-speculative-algorithm {drafts}: {NO_DRAFTS_BY_DISK}"
    if args.check_weight_update_equal and (args.offload_rollout or args.offload_train):
        yield (
            "--check-weight-update-equal with --offload: right after a sync, the engines have no KV cache and the "
            "trainer has no weights in memory, so log-probs cannot be compared; use --ci-test instead, or "
            "--no-offload-train --no-offload-rollout"
        )


def _quantized(options: Mapping[str, object]) -> Iterator[str]:
    """Messages about SGLang options that quantize weights.

    SGLang quantizes a layer's weights when it loads them. It then fails when new weights arrive. Its load format
    ``flash_rl`` should accept new weights. But in 0.5.20, ``flash_rl`` puts scales of keys and values into wrong rows
    if the queries came in an earlier bucket, and it fails with several GPUs. In 0.5.23, it accepts only dense Qwen2 and
    Qwen3.
    """
    for name in ("quantization", "load_format"):
        value = options.get(name)
        if value and value != "unquant" and (name != "load_format" or value == "flash_rl"):
            yield (
                f"--sglang-{name.replace('_', '-')} {value}: SGLang cannot load the trainer's weights into layers "
                "that it has quantized; leave the flag out, and engines compute in bfloat16 like the trainer"
            )


def _data(args: Args) -> Iterator[str]:
    """Problems of prompts, lengths, sampling and groups."""
    context, prompt, response = args.rollout_max_context_len, args.rollout_max_prompt_len, args.rollout_max_response_len
    if response is None:
        yield "--rollout-max-response-len is missing: give the largest number of tokens of a response"
    elif response < 1 and args.job.engines and not args.rollout_function_path:
        yield f"--rollout-max-response-len {response}: must be at least 1"
    if context is not None and prompt is not None and prompt > context - 1:
        yield f"--rollout-max-prompt-len {prompt} leaves no room for a response in --rollout-max-context-len {context}"
    for dataset in args.eval_datasets:
        yield from dataset.problems()
        if dataset.custom_generate_function_path in (CHOOSE, CONTINUE) and not args.engine_kind.scores:
            yield (
                f"eval dataset {dataset.name}: choices are scored by their likelihoods, but --rollout-backend "
                f"{args.rollout_backend} does not return likelihoods; use --rollout-backend embedded"
            )
    yield from _truncation(args)
    if args.prompt_data_weights and len(args.prompt_data_weights) != len(args.prompt_data):
        count = len(args.prompt_data_weights)
        yield f"--prompt-data-weights has {count} weights for {len(args.prompt_data)} paths of --prompt-data"
    at_once, batch = args.over_sampling_batch_size, args.rollout_batch_size
    if args.job.engines and at_once is not None and batch is not None and at_once < batch:
        yield f"--over-sampling-batch-size {at_once} must be at least --rollout-batch-size {batch}"
    if args.n_samples_per_prompt != 1 or not args.job.engines:
        return
    if (args.dynamic_sampling_filter_path or "").split(".")[-1].split(":")[-1].startswith("check_reward_nonzero_std"):
        yield (
            "--n-samples-per-prompt 1: the filter check_reward_nonzero_std drops every group with one response; give "
            "at least 2"
        )
    compares = args.job.loss == "policy" and (args.estimator.group is not None or args.estimator.compares)
    own_code = args.custom_reward_post_process_path or args.custom_advantage_function_path or args.rollout_function_path
    if compares and args.rewards_normalization and args.job.trains and not (own_code or args.use_opd):
        yield (
            f"--n-samples-per-prompt 1: {args.advantage_estimator} compares the responses to a prompt with each "
            "other; give at least 2, or use the raw reward with --disable-rewards-normalization"
        )


def _truncation(args: Args) -> Iterator[str]:
    """Problems if top-p, top-k, min-p or a grammar excludes tokens during sampling. Training then needs the ids of the
    tokens that were kept."""
    params = SamplingParams.of(args, "rollout")
    if args.train_constrained and args.allow_truncated_sampling:
        yield "--train-constrained needs the token ids that --allow-truncated-sampling does not record; choose one"
    elif args.train_constrained and args.job.syncs and not args.engine_kind.kept:
        yield (
            f"--train-constrained: --rollout-backend {args.rollout_backend} does not report which tokens a grammar "
            "allowed; use embedded or sglang"
        )
    if not params.truncation() or args.job.loss != "policy" or not args.job.syncs or args.allow_truncated_sampling:
        return
    name, value = next(iter(params.truncation().items()))
    what, options = f"--rollout-{name.replace('_', '-')} {value}", args.sglang_overrides
    if not args.engine_kind.kept:
        yield (
            f"{what}: --rollout-backend {args.rollout_backend} does not report which tokens it kept, so training would "
            "use log-probs without truncation; use embedded or sglang, or accept this with "
            "--allow-truncated-sampling"
        )
    if params.top_k == 1:
        yield "--rollout-top-k 1 samples greedily, so all responses of a group would be equal; give at least 2"
    if not args.job.servers:
        return
    if drafts := options.get(DRAFTS):
        yield (
            f"{what} with --sglang-speculative-algorithm {drafts}: with speculative decoding, SGLang does not report "
            "which tokens it kept; leave one flag out, or accept this with --allow-truncated-sampling"
        )
    if params.top_k > (most := options.get("sampling_mask_max_tokens", SGLANG_MOST_KEPT)):
        yield (
            f"--rollout-top-k {params.top_k}: SGLang reports at most {most} kept tokens; raise "
            "--sglang-sampling-mask-max-tokens"
        )
    if params.min_p and options.get("enable_deterministic_inference"):
        yield "--rollout-min-p with --sglang-enable-deterministic-inference: SGLang cannot combine them; choose one"


def _loss(args: Args) -> Iterator[str]:
    for registry, name in ((LOSSES, args.loss_type), (CORRECTIONS, args.correction)):
        if name not in registry.initial and registry[name].function is None:
            yield f"{registry.option} {name}: its record has no function; add function=... to the record"
    if args.use_reference and not args.ref_load:
        yield "--ref-load is missing: a KL term, DPO or KTO needs a reference model"
    penalised = args.job.sampled and args.kl_coef != 0
    if penalised and args.kl_loss_coef != 0:
        yield "--kl-coef (in the reward) and --kl-loss-coef (in the loss) are both above 0; choose one"
    if penalised and not args.estimator.takes_kl:
        instead = f"use --use-kl-loss --kl-loss-coef {args.kl_coef}"
        yield f"--kl-coef {args.kl_coef} has no effect with {args.advantage_estimator}: {instead}"
    in_loss = args.job.sampled and args.use_kl_loss and args.kl_loss_coef != 0
    if in_loss and not (KL_KINDS[args.kl_loss_type].pulls or args.use_unbiased_kl):
        yield f"--kl-loss-type {args.kl_loss_type} has a mean gradient of 0: use low_var_kl, or add --use-unbiased-kl"
    learner = f"the critic of {args.advantage_estimator}" if args.use_critic else "the policy loss"
    learns = args.use_critic or (args.job.loss == "policy" and args.job.trains)
    if learns and not args.compute_advantages_and_returns:
        yield f"--disable-compute-advantages-and-returns leaves {learner} nothing to learn from; remove the flag"
    if args.calculate_per_token_loss and args.loss_aggregation != "token":
        yield f"--calculate-per-token-loss means --loss-aggregation token, not {args.loss_aggregation}; choose one"
    if args.custom_pg_loss_reducer_function_path and args.loss_aggregation == "constant":
        yield "--loss-aggregation constant and --custom-pg-loss-reducer-function-path both reduce the loss; choose one"
    if args.loss_aggregation == "constant" and not args.rollout_max_response_len:
        yield "--loss-aggregation constant divides by --rollout-max-response-len, which is missing"
    if (args.job.loss == "paired" or args.loss.judged) and args.loss_aggregation != "rollout":
        how = "--calculate-per-token-loss" if args.calculate_per_token_loss else "--loss-aggregation"
        what = "replies" if args.loss.judged else "pairs"
        yield f"--loss-type {args.loss_type} is a mean over {what}: leave {how} out"
    if args.loss.judged and args.label_key is None and not args.job.saved:
        yield f"--loss-type {args.loss_type} needs --label-key: the name of the column that marks desirable replies"
    replies, size = (args.rollout_batch_size or 0) * args.n_samples_per_prompt, args.global_batch_size
    if args.loss.judged and size and (size == 1 or replies % size == 1):
        yield (
            f"--loss-type {args.loss_type} --global-batch-size {size}: one step has only one of {replies} replies, but "
            "the KL is measured on replies to other prompts of the step; choose sizes that give every step at least "
            "two replies"
        )
    if args.loss.scores and args.lora_rank:
        yield f"--loss-type {args.loss_type} trains all weights: leave --lora-rank out"
    if args.loss.scores and args.job.evaluates:
        yield f"--loss-type {args.loss_type} trains a model that generates no responses: leave --eval-interval out"
    if args.job.loss == "paired" and args.chosen_key == args.rejected_key:
        yield f"--chosen-key and --rejected-key are both {args.chosen_key!r}: name two different columns"


def _rewards(args: RewardArgs) -> Iterator[str]:
    # the pre-flight check reports an unknown rule
    if args.rm_type and args.rm_type in RULES and (missing := RULES[args.rm_type].lacks(args)):
        yield missing
    if 0 < args.reward_timeout <= args.code_timeout:
        yield f"--code-timeout {args.code_timeout}: must be below --reward-timeout {args.reward_timeout}"
    if args.overlong_buffer_len is not None and args.overlong_buffer_len > (args.rollout_max_response_len or 0):
        limit = args.rollout_max_response_len
        yield f"--overlong-buffer-len {args.overlong_buffer_len} is above --rollout-max-response-len {limit}"
    shaped = args.overlong_buffer_len is not None or args.format_reward_coef != 0
    if shaped and args.custom_reward_post_process_path:
        yield (
            "--custom-reward-post-process-path replaces all changes to the rewards: leave out --overlong-buffer-len "
            "and --format-reward-coef"
        )
    if args.format_regex is not None:
        try:
            re.compile(args.format_regex)
        except re.error as error:
            yield f"--format-regex {args.format_regex!r}: {error}"


def _training(args: Args) -> Iterator[str]:
    if args.training_ranks % max(args.dp_replicate_size, 1):
        yield f"--dp-replicate-size {args.dp_replicate_size} does not divide the {args.training_ranks} training ranks"
    if args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr} is above --lr {args.lr}"
    elif args.use_critic and args.min_lr > args.critic_lr:
        yield f"--min-lr {args.min_lr} is above --critic-lr {args.critic_lr}"
    if args.sends_adapter and not (args.engine_kind.adapters and not args.rollout_external_engine_addrs):
        yield "--lora-sync adapter is for SGLang servers that the run starts (--rollout-backend sglang); use merged"
    if args.lora_rank and args.optimizer == "muon" and args.job.trains:
        yield "--optimizer muon with --lora-rank: Muon trains whole matrices, not the factors of an adapter; use adam"
    if args.load_in_4bit and args.compile and args.job.trains:
        yield "--load-in-4bit with --compile: torch.compile does not support 4-bit matrix products; leave one flag out"
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        yield "--lr-warmup-fraction and --lr-warmup-iters both set the length of warm-up; choose one"


def _correction(args: CorrectionArgs) -> Iterator[str]:
    """Correction flags that contradict each other or change nothing."""
    chosen = args.correction
    if args.use_tis and chosen != "tis" and args.custom_tis_function_path is None:
        yield f"--use-tis means --correction tis, not {chosen}; choose one"
    if args.custom_tis_function_path is not None and chosen != "custom":
        yield f"--custom-tis-function-path replaces --correction {chosen}; choose one of them"
    weighs = chosen != "none" and (chosen != "mis" or args.mis_mode != "none")
    if args.use_rollout_logprobs and weighs:
        yield (
            f"--use-rollout-logprobs and --correction {chosen}: with the engine's log-probs there is no mismatch to "
            "correct; choose one. Only rejection, with --correction mis --mis-mode none, is possible together"
        )
    if args.tis_clip_low > args.tis_clip:
        yield f"--tis-clip-low {args.tis_clip_low} is above --tis-clip {args.tis_clip}"
    for kind in ("", "rejection_") if chosen == "mis" else ():
        low, high = getattr(args, f"mis_{kind}lower_bound"), getattr(args, f"mis_{kind}upper_bound")
        name = f"--mis-{kind.replace('_', '-')}"
        if low is not None and high is not None and low > high:
            yield f"{name}lower-bound {low} is above {name}upper-bound {high}"
    drops = args.mis_rejection_level is not None or args.mis_veto_threshold is not None
    if chosen == "mis" and args.mis_mode == "none" and not drops:
        yield "--mis-mode none corrects nothing by itself: give --mis-rejection-level or --mis-veto-threshold"


def _distillation(args: DistillationArgs) -> Iterator[str]:
    """Distillation flags that contradict each other or are missing."""
    if not (args.job.sampled and args.compute_advantages_and_returns):
        cause = "--disable-compute-advantages-and-returns" if args.job.sampled else f"--loss-type {args.loss_type}"
        yield f"--use-opd changes the advantages, but with {cause} there are no advantages"
    if args.opd_type is None:
        yield "--use-opd needs --opd-type: trainer (with --opd-teacher-load) or sglang (with --rm-url)"
    elif args.opd_type == "sglang":
        yield from _teacher_server(args)


def _teacher_server(args: DistillationArgs) -> Iterator[str]:
    if args.train_constrained:
        yield (
            "--opd-type sglang with --train-constrained: the teacher's server returns log-probs over all tokens; "
            "leave one flag out, or use --opd-type trainer"
        )
    if SamplingParams.of(args, "rollout").truncation() and not args.allow_truncated_sampling:
        yield (
            "--opd-type sglang with --rollout-top-p, --rollout-top-k or --rollout-min-p: the teacher's server "
            "returns log-probs over the whole vocabulary; leave these flags out, or use --opd-type trainer"
        )
    if args.opd_teacher_load is not None:
        yield "--opd-teacher-load with --opd-type sglang: the teacher is the server at --rm-url; choose one"
    # user code that makes whole samples may already have their scores from a teacher
    scored_elsewhere = args.job.saved or args.rollout_function_path or args.custom_generate_function_path
    if args.rm_url is None and not scored_elsewhere:
        yield "--opd-type sglang needs --rm-url, the address of the teacher's /generate"
    elif args.rm_url is not None and not args.rm_url.startswith(("http://", "https://")):
        yield f"--rm-url {args.rm_url}: the address must start with http:// or https://"
    if args.rm_type and args.rm_type in RULES and RULES[args.rm_type].needs == "rm_url":
        yield f"--rm-type {args.rm_type} and --opd-type sglang both read --rm-url; write the reward as --custom-rm-path"


def _evaluation(args: Args) -> Iterator[str]:
    """Problems of the flags that choose the best evaluation."""
    metric, ours = args.early_stop_metric, not (args.eval_function_path or args.custom_eval_rollout_log_function_path)
    if args.eval_bpb and args.offload_train:
        yield "--eval-bpb with --offload-train: trainers measure it while the engines occupy the GPUs; choose one"
    known, parts = ["eval/bpb"] * bool(args.eval_bpb), tuple[str, ...]()
    for dataset in args.eval_datasets:
        known += dataset.metrics()
        parts += (f"eval/{dataset.name}/reward/",)
    if metric is not None and known and ours and metric not in known and not metric.startswith(parts):
        near = difflib.get_close_matches(metric, known, n=1, cutoff=SIMILAR)
        hint = f"did you mean {near[0]}?" if near else f"the metrics are {', '.join(known)}"
        yield f"--early-stop-metric {metric}: no evaluation measures this metric; {hint} (and eval/NAME/reward/PART)"
    if args.save_best and (args.eval_interval or 0) % args.update_weights_interval:
        yield (
            f"--save-best with --eval-interval {args.eval_interval} and --update-weights-interval "
            f"{args.update_weights_interval}: an evaluation would use older weights than the saved model; make "
            "--eval-interval a multiple of --update-weights-interval"
        )
