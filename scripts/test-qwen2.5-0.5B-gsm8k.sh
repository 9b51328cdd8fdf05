#!/usr/bin/env bash
# GRPO of Qwen2.5-0.5B-Instruct on GSM8K: slime's script of this name, flag for flag.
#
#   python scripts/prepare_data.py gsm8k --source hub --out data/gsm8k
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct DATA=data/gsm8k NUM_GPUS=4 bash scripts/test-qwen2.5-0.5B-gsm8k.sh [--any-flag value]
#
# Flags after the script's name come last and win. --dry-run checks everything and starts nothing.
set -euo pipefail
SCRIPT_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$SCRIPT_DIR/../models/qwen2.5-0.5B.sh"
source "$SCRIPT_DIR/lib/submit.sh"

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-data/gsm8k}
NUM_GPUS=${NUM_GPUS:-$(compgen -G "/dev/nvidia[0-9]*" | wc -l || true)}
((NUM_GPUS > 0)) || NUM_GPUS=1

CKPT_ARGS=(
    --hf-checkpoint "$MODEL"
    --ref-load "${REF_MODEL:-$MODEL}"
)

ROLLOUT_ARGS=(
    --prompt-data "$DATA/train.parquet"
    --input-key messages
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type math
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 1024
    --rollout-temperature 0.8

    --over-sampling-batch-size 64
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std

    --global-batch-size 256
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data gsm8k "$DATA/test.parquet"
    --n-samples-per-eval-prompt 1
    --eval-max-response-len 1024
    --eval-top-k 1
)

PERF_ARGS=(
    --tensor-model-parallel-size 1
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --expert-model-parallel-size 1
    --expert-tensor-parallel-size 1

    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)

WANDB_ARGS=()
if [[ -n "${WANDB_API_KEY:-}" ]]; then
    WANDB_ARGS=(--use-wandb --wandb-project slimelite --wandb-group gsm8k_qwen2.5_0.5B)
fi

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.7
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

submit \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node "$NUM_GPUS" \
    --colocate \
    "${MODEL_ARGS[@]}" \
    "${CKPT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${GRPO_ARGS[@]}" \
    "${WANDB_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${EVAL_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" \
    "$@"
