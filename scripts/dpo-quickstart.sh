#!/usr/bin/env bash
# Preference training, offline: of two answers the worked one is preferred to a wrong guess.   bash scripts/dpo-quickstart.sh
#
#   1. .venv, data/quickstart and the SFT model of scripts/quickstart.sh, where they are not there yet
#   2. greedy accuracy on held-out prompts: the SFT model mostly guesses
#   3. DPO on 3,200 pairs, 50 optimizer steps
#   4. the same accuracy again; metrics, pairs and plots are in runs/quickstart/seed-N/dpo
#
# SEED=3 bash scripts/dpo-quickstart.sh --dpo-beta 0.1     (flags go to the DPO run and win)
# MODEL=an/SFT/model bash scripts/dpo-quickstart.sh        (no SFT)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export SEED=${SEED:-0}
export DATA=${DATA:-data/quickstart}
export OUT=${OUT:-runs/quickstart/seed-$SEED}
if [[ -z "${MODEL:-}" ]]; then
    MODEL=$OUT/sft-model
    # SFT, and nothing of GRPO but the evaluation before it
    [[ -f "$MODEL/config.json" ]] || MODEL="" bash scripts/quickstart.sh --num-rollout 0
fi
bash scripts/setup.sh
source scripts/lib/programs.sh
export HF_HUB_OFFLINE=1
[[ -f "$DATA/pairs.parquet" ]] || python scripts/prepare_data.py quickstart --out "$DATA"
rm -rf "$OUT/dpo"

DATA_ARGS=(
    --prompt-data "$DATA/pairs.parquet"
    --input-key messages # the prompt; the two replies are in the columns chosen and rejected
    --apply-chat-template
    --rollout-shuffle
    --num-epoch 1
    --rollout-batch-size 640 # pairs
    --global-batch-size 64   # pairs
)

DPO_ARGS=(
    --loss-type dpo_loss # the reference is --hf-checkpoint
    --dpo-beta 0.5
    --dpo-label-smoothing 0.1 # else the guesses are pushed down without end, and what they share with good answers too
    --optimizer adam
    --lr 1e-4
)

EVAL_ARGS=(
    --eval-interval 5
    --eval-prompt-data heldout "$DATA/heldout.parquet"
    --eval-label-key label
    --eval-max-response-len 32
    --eval-top-k 1
    --rm-type gsm8k
)

COMMON_ARGS=(
    --use-dynamic-batch-size
    --max-tokens-per-gpu 16384
    --seed "$SEED"
    --rollout-seed "$SEED"
)

python train.py --hf-checkpoint "$MODEL" "${DATA_ARGS[@]}" "${DPO_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${COMMON_ARGS[@]}" --run-dir "$OUT/dpo" "$@"
