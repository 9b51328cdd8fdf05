#!/usr/bin/env bash
# A tiny model learns tasks of reasoning-gym, offline:   bash scripts/reasoning_gym.sh spell_backward 'min_word_len=3&max_word_len=5'
#
#   1. a tokenizer, the shape of a 120k-parameter model, and 4,000 answers of which 35 % are right
#   2. SFT on them
#   3. GRPO on --environment reasoning-gym, evaluated on rows of another seed
#
# SEED=3 bash scripts/reasoning_gym.sh gcd 'max_value=30' --num-rollout 80     (flags go to the GRPO run and win)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
TASK=$1 SPEC="$1?prompt=none&$2"
shift 2
SEED=${SEED:-0} OUT=${OUT:-runs/reasoning-gym/$TASK}
DATA=$OUT/data OUT=$OUT/seed-$SEED
[[ -f "$DATA/sft.parquet" ]] || PYTHONPATH=. python scripts/lib/reasoning_gym_data.py "$SPEC&size=4000" --out "$DATA"
rm -rf "$OUT"

COMMON=(--launcher local --use-dynamic-batch-size --max-tokens-per-gpu 16384 --seed "$SEED" --rollout-seed "$SEED")
SFT=(
    --hf-checkpoint "$DATA/model" --prompt-data "$DATA/sft.parquet" --input-key messages --loss-type sft_loss
    --num-rollout 10 --rollout-batch-size 3200 --global-batch-size 64 --rollout-shuffle
    --optimizer muon --muon-lr 0.02 --lr 5e-3 --lr-decay-style linear --save-hf "$OUT/sft-model"
)
RL=(
    --hf-checkpoint "$OUT/sft-model" --environment "reasoning-gym:$SPEC&size=2000" --rollout-shuffle
    --num-rollout 40 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 16
    --lr 1e-3 --lr-warmup-iters 5 --eps-clip 0.2 --eps-clip-high 0.28
    --eval-interval 10 --eval-top-k 1 --eval-prompt-data other "environment:reasoning-gym:$SPEC&size=256&seed=1"
)
python train.py "${COMMON[@]}" "${SFT[@]}" --run-dir "$OUT/sft"
python train.py "${COMMON[@]}" "${RL[@]}" --run-dir "$OUT/rl" "$@"
