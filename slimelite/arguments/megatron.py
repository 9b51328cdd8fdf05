"""Flags of slime and Megatron that are known and change nothing here, each with the reason.

Megatron's flags that do something here are fields of the groups: the model's shape is checked (`architecture`),
``--recompute-granularity`` and ``--optimizer-cpu-offload`` are mapped (`perf`).
"""

from __future__ import annotations

from typing import Any

_FSDP = "FSDP2 shards parameters, gradients and optimizer state over all ranks"
_LAYOUT = "FSDP2 shards over all ranks instead: results are the same, and the longest sequence must fit one rank"
_CONFIG = "the model's config.json says it"
_KERNEL = "a choice among Megatron's kernels"
_PIPELINE = "there are no pipeline stages"
ROUTER = "there is no router process: the rollout manager balances over the engines itself"
_PRECISION = "weights, gradients and moments are kept in fp32"
_HF_WEIGHTS = "weights are in Hugging Face format throughout"
_MOE_ROUTING = "the Hugging Face model routes its tokens as its config.json says"
_NO_MTP = "there are no multi-token-prediction layers to train"
_HEALTH = "checks begin when the engines have started"
_CRITIC = "the critic is trained on the ranks of the policy, on the same samples"
_UNPADDED = "samples are packed without padding"

# what plugins of slime's read of flags that are no fields here, whatever was given for them
PLUGIN_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"], 1),
    **dict.fromkeys(["expert_model_parallel_size", "expert_tensor_parallel_size", "sglang_dp_size"], 1),
    **dict.fromkeys(["sequence_parallel", "allgather_cp", "use_slime_router", "use_rollout_routing_replay"], False),
    **dict.fromkeys(["sglang_speculative_algorithm", "sglang_model_routers", "router_policy", "multimodal_keys"], None),
    "sglang_enable_deterministic_inference": False,
    "qkv_format": "thd",  # packed without padding
}

# flag -> (number of values, why it changes nothing)
NO_EFFECT: dict[str, tuple[int, str]] = {
    # parallelism and memory
    **dict.fromkeys(["tensor-model-parallel-size", "pipeline-model-parallel-size"], (1, _LAYOUT)),
    **dict.fromkeys(["context-parallel-size", "cp-comm-type"], (1, _LAYOUT)),
    **dict.fromkeys(["expert-model-parallel-size", "expert-tensor-parallel-size"], (1, _LAYOUT)),
    "allgather-cp": (0, _LAYOUT),
    "sequence-parallel": (0, "it belongs to tensor parallelism, which is not used"),
    "decoder-first-pipeline-num-layers": (1, _PIPELINE),
    "decoder-last-pipeline-num-layers": (1, _PIPELINE),
    "use-distributed-optimizer": (0, _FSDP),
    "overlap-cpu-optimizer-d2h-h2d": (0, "FSDP2 overlaps its own transfers"),
    "use-precision-aware-optimizer": (0, _PRECISION),
    "fsdp-state-dict-cpu-offload": (0, "every rank writes its own shard of a checkpoint"),
    "no-fsdp-state-dict-cpu-offload": (0, "every rank writes its own shard of a checkpoint"),
    "fsdp-cpu-backend": (1, "gloo is used wherever tensors are in host memory"),
    "keep-fp32-master": (0, _PRECISION),
    "train-memory-margin-bytes": (1, "memory is not managed in advance"),
    "recompute-method": (1, "whole layers are recomputed, one by one"),
    "recompute-num-layers": (1, "whole layers are recomputed, one by one"),
    "recompute-loss-function": (0, "the LM head and the loss are computed in chunks and never held whole"),
    # numerics
    "attention-softmax-in-fp32": (0, "attention kernels accumulate their softmax in fp32"),
    "accumulate-allreduce-grads-in-fp32": (0, "gradients are reduced in fp32"),
    "attention-backend": (1, "--attn-implementation chooses the attention kernel"),
    "bf16": (0, "a GPU computes in bfloat16 anyway, and a CPU in float32"),
    "no-check-for-nan-in-loss-and-grad": (0, "--nonfinite-grad says what happens; skipping the step is the default"),
    "transformer-impl": (1, _KERNEL),
    "no-gradient-accumulation-fusion": (0, _KERNEL),
    "no-masked-softmax-fusion": (0, _KERNEL),
    "no-rope-fusion": (0, _KERNEL),
    "qwen-gdn-backend": (1, _KERNEL),
    "qkv-format": (1, _UNPADDED),
    "data-pad-size-multiplier": (1, _UNPADDED),
    "seq-length": (1, "a packed pass has the length of its samples"),
    "balance-data": (0, "ranks are always dealt as equal a number of tokens as the samples allow"),
    "use-dynamic-global-batch-size": (0, "every sample of a rollout is trained, whatever their number"),
    "allow-partial-train-step": (0, "samples that do not fill a step make a smaller one"),
    "disable-rollout-trim-samples": (0, "no sample is trimmed away"),
    # shape of the model, beyond what is checked
    "no-position-embedding": (0, _CONFIG),
    "make-vocab-size-divisible-by": (1, "the vocabulary is not padded"),
    "padded-vocab-size": (1, "the vocabulary is not padded"),
    "post-self-attn-layernorm": (0, _CONFIG),
    "post-mlp-layernorm": (0, _CONFIG),
    "apply-layernorm-1p": (0, _CONFIG),
    "attention-output-gate": (0, _CONFIG),
    "use-gated-attention": (0, _CONFIG),
    "rotary-interleaved": (0, _CONFIG),
    "spec": (2, "the layers are Hugging Face's"),
    "model-name": (1, _HF_WEIGHTS),
    "megatron-to-hf-mode": (1, _HF_WEIGHTS),
    "use-hf-config-for-megatron": (0, _CONFIG),
    "disable-weights-backuper": (0, "there is no second copy of the weights in host memory"),
    **dict.fromkeys(
        ["q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim", "mscale", "mscale-all-dim"],
        (1, _CONFIG),
    ),
    "multi-latent-attention": (0, _CONFIG),
    **dict.fromkeys(["num-experts", "moe-ffn-hidden-size", "moe-layer-freq"], (1, _CONFIG)),
    **dict.fromkeys(["moe-shared-expert-intermediate-size"], (1, _CONFIG)),
    "moe-shared-expert-gate": (0, _CONFIG),
    **dict.fromkeys(
        ["moe-router-topk", "moe-router-score-function", "moe-router-dtype", "moe-router-topk-scaling-factor"],
        (1, _MOE_ROUTING),
    ),
    **dict.fromkeys(["moe-router-num-groups", "moe-router-group-topk"], (1, _MOE_ROUTING)),
    **dict.fromkeys(["moe-router-load-balancing-type", "moe-token-drop-policy"], (1, _MOE_ROUTING)),
    **dict.fromkeys(["moe-router-pre-softmax", "moe-router-enable-expert-bias"], (0, _MOE_ROUTING)),
    "moe-token-dispatcher-type": (1, _KERNEL),
    **dict.fromkeys(["moe-grouped-gemm", "moe-permute-fusion", "moe-enable-deepep"], (0, _KERNEL)),
    **dict.fromkeys(["index-topk-freq", "index-skip-topk-offset", "index-num-attention-heads"], (1, _CONFIG)),
    **dict.fromkeys(["index-kd-loss-coeff", "fused-select-topk-block-size"], (1, _CONFIG)),
    **dict.fromkeys(
        ["index-absorb-kv-norm-fp32", "index-dsa-use-layernorm", "index-use-fused-bwd-tilelang"], (0, _CONFIG)
    ),
    "index-use-torch-topk": (0, _CONFIG),
    "mtp-loss-scaling-factor": (1, _NO_MTP),
    **dict.fromkeys(["critic-num-gpus-per-node", "critic-num-nodes"], (1, _CRITIC)),
    "rs-tr-threshold": (1, "it belongs to --rs-trust-region"),
    # engines and the way to them
    "num-gpus-per-node": (1, "Ray knows the GPUs of each node"),
    **dict.fromkeys(["sglang-router-ip", "sglang-router-port", "sglang-router-request-timeout-secs"], (1, ROUTER)),
    **dict.fromkeys(["use-slime-router", "use-distributed-post", "use-http2"], (0, ROUTER)),
    "http-proxy": (1, ROUTER),
    "sglang-disable-piecewise-cuda-graph": (
        0,
        "an option of older SGLang; --sglang-cuda-graph-backend-prefill disabled says it today",
    ),
    "slime-router-middleware-paths": (-1, ROUTER),
    **dict.fromkeys(["slime-router-timeout", "slime-router-max-connections"], (1, ROUTER)),
    "slime-router-health-check-failure-threshold": (1, ROUTER),
    "rollout-health-check-first-wait": (1, _HEALTH),
    "update-weight-delta-encoding": (1, "weights are sent whole"),
    "update-weight-delta-checksum": (1, "weights are sent whole"),
    # metrics and profiling
    "get-mismatch-metrics": (0, "the mismatch of trainer and engine is always logged"),
    "use-rollout-entropy": (0, "the entropy is always logged; it comes from the same pass as the log-probs"),
    "use-checkpoint-lr-scheduler": (0, "on resume the checkpoint's schedule wins anyway"),
    "warmup-ratio": (1, "slime does not read it either; use --lr-warmup-fraction"),
    **dict.fromkeys(
        ["memory-snapshot-dir", "memory-snapshot-path", "memory-snapshot-num-steps"], (1, "no snapshot is taken")
    ),
    "memory-recorder": (1, "no snapshot is taken"),
    "profile-target": (-1, "no profile is taken"),
    **dict.fromkeys(["profile-step-start", "profile-step-end"], (1, "no profile is taken")),
    # the rollout_buffer plugin of slime's early days
    **dict.fromkeys(
        ["fetch-trajectory-retry-times", "min-batch-collection-ratio", "rollout-task-type"],
        (1, "it belongs to --rollout-buffer-url"),
    ),
}
