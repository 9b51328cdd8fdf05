#!/usr/bin/env bash
# A model learns a game by playing against itself.   SEED=0 bash docs/examples/self_play/run.sh [flags of the RL run]
set -euo pipefail
SEED=${SEED:-0} OUT=${OUT:-runs/examples/self_play}
source docs/examples/stages.sh
# its tokenizer has a token for each number; runs/quickstart/seed-0/sft-model has learned numbers, too
DATA=$OUT/sft.parquet MODEL=${MODEL:-data/quickstart/model}
[[ -f "$DATA" ]] || python docs/examples/self_play/make.py "$DATA"

SFT+=(--hf-checkpoint "$MODEL" --prompt-data "$DATA" --num-rollout "${SFT_ROLLOUTS:-3}")
RL+=(
    --environment nim --rollout-max-response-len 4 --rollout-max-context-len 128
    --num-rollout 40 --rollout-batch-size 35 --entropy-coef 0.02
    --eval-interval 10 --eval-prompt-data random "environment:nim:random@[:140]" perfect "environment:nim:perfect@[:140]"
    --eval-top-k 1
)
stages "$@"
