"""Flags of slime, Megatron and miles that ask for what slimelite does not have: why, and what to do instead."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """A flag that is refused, unless its value is one of ``harmless`` (which mean "off")."""

    arity: int
    reason: str
    harmless: tuple[str, ...] = ()


_FP8 = "training is in bfloat16 or float32; for an fp8 engine use --sglang-quantization fp8"
_MOE = "experts are trained as the Hugging Face model defines them, without this; leave it out"
_DELTA = "weights are sent whole, straight to the engines; leave it out"
_ROUTING = "expert routing is not replayed; --correction tis corrects the mismatch of trainer and engine"
_MEGATRON_HOOK = "there is no Megatron to hook into; a custom loss, advantage or generate function may do"
_DEEPGEMM = "the trainer runs no Megatron layers; --correction tis corrects the mismatch of trainer and engine"
_LORA = "all parameters are trained; LoRA is not here yet"
_ASYNC = "--async-rollout generates one rollout ahead; with --partial-rollout no response holds it up"
_FROZEN = "all parameters are trained; freezing is not here yet"
_PROFILE = "no profiler is built in; perf/* metrics time every phase, and py-spy can attach to the workers"
_LOGGERS = "metrics go to metrics.jsonl in the run folder, --use-wandb and --use-tensorboard"
_BUFFER = "write a --rollout-function-path or --data-source-path of your own"
_IMAGES = "prompts are text; images, video and audio are not here yet"
_FLEET = "all engines are alike and start with the run; --rollout-num-gpus says how many"

REFUSED: dict[str, Refusal] = {
    # numerics
    "fp16": Refusal(0, "there is no loss scaler; GPUs train in bfloat16"),
    "no-keep-fp32-master": Refusal(0, "bfloat16 weights would lose small updates; weights are kept in fp32"),
    "attention-dropout": Refusal(1, "a policy with dropout is not the one that generated; leave it at 0", ("0",)),
    "hidden-dropout": Refusal(1, "a policy with dropout is not the one that generated; leave it at 0", ("0",)),
    "fp8-format": Refusal(1, _FP8),
    "fp8-recipe": Refusal(1, _FP8),
    "fp8-param-gather": Refusal(0, _FP8),
    "megatron-deepgemm-forward-layers": Refusal(-1, _DEEPGEMM),
    "megatron-deepgemm-forward-modules": Refusal(-1, _DEEPGEMM),
    "megatron-deepgemm-moe-forward-layers": Refusal(-1, _DEEPGEMM),
    "megatron-deepgemm-moe-forward-modules": Refusal(-1, _DEEPGEMM),
    "true-on-policy-mode": Refusal(
        0, "it needs a patched SGLang; --correction tis corrects the mismatch of trainer and engine"
    ),
    "use-stateless-adam": Refusal(0, "--reset-optimizer-states starts every rollout with fresh moments"),
    # experts
    "moe-aux-loss-coeff": Refusal(1, _MOE, ("0",)),
    "moe-router-bias-update-rate": Refusal(1, _MOE, ("0",)),
    "use-routing-replay": Refusal(0, _ROUTING),
    "use-rollout-routing-replay": Refusal(0, _ROUTING),
    "freeze-indexer": Refusal(0, _FROZEN),
    "mtp-num-layers": Refusal(1, "multi-token-prediction layers are not trained; leave it out", ("0",)),
    "enable-mtp-training": Refusal(0, "multi-token-prediction layers are not trained; leave it out"),
    # what is trained
    "only-train-params-name-list": Refusal(-1, _FROZEN),
    "freeze-params-name-list": Refusal(-1, _FROZEN),
    "lora-rank": Refusal(1, _LORA, ("0",)),
    "lora-alpha": Refusal(1, _LORA),
    "lora-dropout": Refusal(1, _LORA),
    "lora-type": Refusal(1, _LORA),
    "lora-target-modules": Refusal(-1, _LORA),
    "lora-adapter-path": Refusal(1, _LORA),
    "critic-save": Refusal(1, "the critic is in every checkpoint of --save, in its folder 'critic'"),
    "critic-train-only": Refusal(0, "--num-critic-only-steps as large as --num-rollout trains the critic alone"),
    "megatron-config-path": Refusal(1, "what differs for the critic: --critic-lr, --critic-lr-warmup-iters"),
    "opd-teacher-ckpt-step": Refusal(1, "--opd-teacher-load takes a Hugging Face folder: name the one you want"),
    "rs-trust-region": Refusal(1, "--mis-rejection-level sequence or geometric rejects whole responses by their ratio"),
    "rollout-data-postprocess-path": Refusal(
        1, "--rollout-sample-filter-path masks samples and --custom-advantage-function-path edits advantages"
    ),
    "custom-convert-samples-to-train-data-path": Refusal(
        1, "training reads one table of samples; set loss masks and metadata in a generate function"
    ),
    "custom-model-provider-path": Refusal(
        1, "models come from Hugging Face; register your class with AutoModelForCausalLM"
    ),
    "custom-megatron-init-path": Refusal(1, _MEGATRON_HOOK),
    "custom-megatron-before-log-prob-hook-path": Refusal(1, _MEGATRON_HOOK),
    "custom-megatron-before-train-step-hook-path": Refusal(1, _MEGATRON_HOOK),
    "balance-by-flops": Refusal(0, "ranks are dealt equal numbers of tokens; leave it out"),
    "multimodal-keys": Refusal(1, _IMAGES),
    # checkpoints
    "async-save": Refusal(0, "checkpoints are written before training goes on; save less often with --save-interval"),
    "ref-ckpt-step": Refusal(1, "--ref-load takes a Hugging Face folder: name the one you want"),
    "release-train": Refusal(0, "--offload-train moves the trainer to host memory during rollout"),
    # asynchronous training
    "keep-old-actor": Refusal(
        0,
        "engines' log-probs are those of the policy that generated: --correction or --use-rollout-logprobs use them",
    ),
    "fully-async": Refusal(0, _ASYNC),
    "async-max-concurrent-samples": Refusal(1, _ASYNC),
    "pause-generation-mode": Refusal(1, _ASYNC),
    # weight sync
    "update-weight-mode": Refusal(1, _DELTA, ("full",)),
    "update-weight-local-checkpoint-dir": Refusal(1, _DELTA),
    "custom-update-weight-post-write-path": Refusal(1, _DELTA),
    "rollout-data-transport": Refusal(
        1, "training data goes through Ray's object store; leave it out", ("object-store",)
    ),
    # engines
    "prefill-num-servers": Refusal(1, _FLEET),
    "eval-num-gpus": Refusal(1, _FLEET),
    "rollout-num-gpus-per-node": Refusal(1, "Ray knows the GPUs of each node; leave it out"),
    "over-sampling-filter-path": Refusal(1, "it is called --dynamic-sampling-filter-path now"),
    "over-sampling-filter-input-size": Refusal(1, "it is called --over-sampling-batch-size now"),
    "chat-template-path": Refusal(1, "save the template in the tokenizer folder and name that with --tokenizer"),
    # debugging
    "load-forge-rollout-data": Refusal(1, "--load-debug-rollout-data replays saved rollouts"),
    "record-memory-history": Refusal(0, _PROFILE),
    "use-pytorch-profiler": Refusal(0, _PROFILE),
    "save-debug-train-data": Refusal(1, "--save-debug-rollout-data writes the table that training reads"),
    "log-correct-samples": Refusal(0, "the run folder keeps every rollout with its rewards, as parquet"),
    "debug-exit-after-rollout": Refusal(1, "--num-rollout says how many rollouts there are"),
    "use-mlflow": Refusal(0, _LOGGERS),
    "use-prometheus": Refusal(0, _LOGGERS),
    "mfu-peak-tflops": Refusal(1, "perf/* metrics count tokens and seconds, not the share of a peak"),
    "recompute-logprobs-via-prefill": Refusal(
        0, "the trainer computes its own log-probs; --correction tis corrects the mismatch"
    ),
    "rollout-submission-granularity": Refusal(1, "prompts are submitted one for one"),
    "save-trigger-sentinel": Refusal(1, "--save-interval says when checkpoints are written"),
    "session-server": Refusal(0, "a --custom-generate-function-path talks to the engine's /generate itself"),
    "rollout-buffer-url": Refusal(1, _BUFFER),
}

# options of SGLang's server that slimelite sets itself (slime does not take them either)
SGLANG_SET_HERE: dict[str, str] = {
    "model_path": "it is --hf-checkpoint",
    "trust_remote_code": "models are loaded without remote code",
    "random_seed": "it follows --rollout-seed",
    "enable_memory_saver": "it follows --offload-rollout",
    "tp_size": "it is --rollout-num-gpus-per-engine",
    "skip_server_warmup": "engines start without a warm-up request",
    "enable_return_routed_experts": "expert routing is not replayed",
    **dict.fromkeys(
        ["port", "nnodes", "node_rank", "dist_init_addr", "gpu_id_step", "base_gpu_id", "nccl_port"],
        "engines are placed and addressed when they start",
    ),
}
