#!/usr/bin/env bash
# SFT shows a model a tool, RL teaches when to use it.   SEED=0 bash docs/examples/tool/run.sh [flags of the RL run]
set -euo pipefail
SEED=${SEED:-0} OUT=${OUT:-runs/examples/tool}
source docs/examples/stages.sh
DATA=$OUT/data
[[ -d "$DATA" ]] || PYTHONPATH=. python docs/examples/tool/make.py "$DATA"

SFT+=(--hf-checkpoint "$DATA/model" --prompt-data "$DATA/sft.parquet" --num-rollout "${SFT_ROLLOUTS:-10}")
RL+=(
    --environment calculator --prompt-data "environment:calculator@[256:]" --environment-max-turns 4
    --rollout-max-response-len 24 --rollout-max-context-len 128 --rollout-shuffle
    --num-rollout 30 --rollout-batch-size 32
    --eval-interval 10 --eval-prompt-data heldout "environment:calculator@[:256]"
)
stages "$@"
