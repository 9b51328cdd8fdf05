#!/usr/bin/env bash
# From a fresh clone to a curve, offline: a tiny language model learns to show its work.   bash scripts/quickstart.sh
#
#   1. .venv with the tested versions                       (once; minutes)
#   2. data/quickstart: the task (sums of four numbers), its tokenizer and an untrained 120k-parameter Qwen2
#   3. SFT on a mix of worked answers (35 %) and bare guesses (65 %)
#   4. GRPO: reward 1 for the right number. Bare guesses are nearly always wrong, so the model learns to write the
#      steps
#   5. runs/quickstart/seed-N/{sft,grpo}/: metrics, every rollout, curves.png
#
# SEED=3 bash scripts/quickstart.sh --num-rollout 80     (flags go to the GRPO run and override its own)
# MODEL=an/SFT/model bash scripts/quickstart.sh          (no SFT: starts at step 4)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
source scripts/lib/programs.sh
export HF_HUB_OFFLINE=1

SEED=${SEED:-0}
DATA=${DATA:-data/quickstart}
OUT=${OUT:-runs/quickstart/seed-$SEED}
[[ -f "$DATA/train.parquet" ]] || python scripts/prepare_data.py quickstart --out "$DATA"

SFT_ARGS=(
    --hf-checkpoint "$DATA/model" # config and tokenizer: the weights are drawn from --seed
    --prompt-data "$DATA/sft.parquet"
    --input-key messages
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout
    --loss-type sft_loss
    --calculate-per-token-loss
    --disable-compute-advantages-and-returns
    --debug-train-only
    --launcher local # one process: a trainer without an engine has nobody to be placed beside
    --rollout-shuffle
    --num-rollout 10
    --rollout-batch-size 3200
    --global-batch-size 64 # 500 optimizer steps in all
    --optimizer muon
    --muon-lr 0.02
    --lr 5e-3
    --lr-decay-style linear
    --save-hf "$OUT/sft-model"
)

ROLLOUT_ARGS=(
    --prompt-data "$DATA/train.parquet"
    --input-key messages
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type gsm8k
    --num-rollout 40
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 32
    --global-batch-size 256
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
    --optimizer adam
    --lr 1e-3
    --lr-warmup-iters 5
)

EVAL_ARGS=(
    --eval-interval 10
    --eval-prompt-data heldout "$DATA/heldout.parquet"
    --eval-top-k 1
)

COMMON_ARGS=(
    --use-dynamic-batch-size
    --max-tokens-per-gpu 16384
    --seed "$SEED"
    --rollout-seed "$SEED"
)

grpo() { # the model, and the flags of the user
    python train.py --hf-checkpoint "$1" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${EVAL_ARGS[@]}" "${COMMON_ARGS[@]}" \
        --run-dir "$OUT/grpo" "${@:2}"
}

# a mistake in the flags is reported before the SFT, and before the last run is deleted
report=$(grpo "${MODEL:-$DATA/model}" "$@" --dry-run 2>&1) || { echo "$report" >&2; exit 1; }
rm -rf "$OUT"

if [[ -z "${MODEL:-}" ]]; then
    MODEL=$OUT/sft-model
    python train.py "${SFT_ARGS[@]}" "${COMMON_ARGS[@]}" --run-dir "$OUT/sft"
fi
grpo "$MODEL" "$@"
