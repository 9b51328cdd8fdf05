#!/usr/bin/env bash
# GRPO of a real pretrained model on real word problems, on a CPU: SmolLM2-135M-Instruct on SVAMP (or GSM8K).
#
#   python scripts/fetch_smollm2.py data/SmolLM2-135M-Instruct
#   python scripts/prepare_data.py svamp --source hub --shots 4 --out data/svamp    (or --source FOLDER of the original files)
#   bash scripts/run-smollm2-135M-cpu.sh [--any-flag value]
#
# The model is too small for "\boxed{}": four worked examples come before each question, and the answer is "#### n".
# It takes an hour or two on two cores. If you start it again, it resumes from its last checkpoint. TASK=gsm8k selects
# the harder task.
set -euo pipefail
SCRIPT_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$SCRIPT_DIR/../models/smollm2-135M.sh"
source "$SCRIPT_DIR/lib/submit.sh"

TASK=${TASK:-svamp}
MODEL=${MODEL:-data/SmolLM2-135M-Instruct}
DATA=${DATA:-data/$TASK}
RUN=${RUN:-runs/smollm2-135M-$TASK}

CKPT_ARGS=(
    --hf-checkpoint "$MODEL"
    --load "$RUN/checkpoints"
    --save "$RUN/checkpoints"
    --save-interval 5
    --run-dir "$RUN"
)

ROLLOUT_ARGS=(
    --prompt-data "$DATA/train.parquet"
    --input-key messages
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type gsm8k
    --num-rollout 20
    --rollout-batch-size 8
    --n-samples-per-prompt 8
    --rollout-max-response-len 64
    --global-batch-size 64
)

EVAL_ARGS=(
    --eval-interval 10
    --eval-prompt-data "$TASK" "$DATA/test.parquet@[0:100]"
    --eval-top-k 1
    --eval-max-response-len 64
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-5
    --lr-warmup-iters 2
)

PERF_ARGS=(
    --use-dynamic-batch-size
    --max-tokens-per-gpu 2048
)

submit "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "$@"
