#!/usr/bin/env bash
# SFT, then GRPO from its model.   bash docs/examples/sft_then_grpo/run.sh [flags of the GRPO run]
set -euo pipefail
OUT=${OUT:-runs/examples/sft_then_grpo}
COMMON=(--launcher local --input-key messages --use-dynamic-batch-size --max-tokens-per-gpu 16384)

SFT=(
    --hf-checkpoint data/quickstart/model --prompt-data data/quickstart/sft.parquet --loss-type sft_loss
    --num-rollout 2 --rollout-batch-size 640 --global-batch-size 64 --optimizer muon --muon-lr 0.02 --lr 5e-3
    --save-hf "$OUT/sft-model"
)
GRPO=(
    --hf-checkpoint "$OUT/sft-model" --prompt-data data/quickstart/train.parquet --label-key label --apply-chat-template
    --rm-type gsm8k --num-rollout 2 --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 32
    --lr 1e-3
)

[[ -d "$OUT/sft-model" ]] || python train.py "${COMMON[@]}" "${SFT[@]}" --run-dir "$OUT/sft"
python train.py "${COMMON[@]}" "${GRPO[@]}" --run-dir "$OUT/grpo" "$@"
