#!/usr/bin/env bash
# On-policy distillation, offline: the quickstart's model after GRPO teaches the model before GRPO.
#
#   bash scripts/quickstart.sh             # once: the task, and the SFT model that is teacher's ancestor and student
#   bash scripts/distill-quickstart.sh     # flags go to the distillation run and win
#
#   1. the teacher: GRPO from the SFT model with a reward for right answers (as in the quickstart, its model saved)
#   2. the student: the SFT model again. It sees no reward; the teacher judges every token it samples
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z "${VIRTUAL_ENV:-}" && -x "${VENV:-.venv}/bin/python" ]]; then source scripts/lib/programs.sh; fi
export HF_HUB_OFFLINE=1

SEED=${SEED:-0}
DATA=${DATA:-data/quickstart}
STUDENT=${STUDENT:-runs/quickstart/seed-$SEED/sft-model}
OUT=${OUT:-runs/distill-quickstart/seed-$SEED}
TEACHER=${TEACHER:-$OUT/teacher-model}
[[ -f "$STUDENT/config.json" ]] || { echo "no $STUDENT: run scripts/quickstart.sh first" >&2; exit 1; }

TASK_ARGS=(
    --prompt-data "$DATA/train.parquet"
    --input-key messages
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type gsm8k # of the student: for the curve and the evaluation alone
    --rollout-max-response-len 32
    --use-dynamic-batch-size
    --max-tokens-per-gpu 16384
    --seed "$SEED"
    --rollout-seed "$SEED"
)

EVAL_ARGS=(
    --eval-interval 10
    --eval-prompt-data heldout "$DATA/heldout.parquet"
    --eval-top-k 1
)

TEACHER_ARGS=(
    --num-rollout 40
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --global-batch-size 256
    --eps-clip-high 0.28
    --lr 1e-3
    --lr-warmup-iters 5
    --save-hf "$TEACHER"
)

DISTILL_ARGS=(
    --use-opd
    --opd-type trainer
    --opd-teacher-load "$TEACHER"
    --num-rollout 20
    --rollout-batch-size 256
    --n-samples-per-prompt 1 # no group to compare with: the teacher alone trains
    --lr 1e-3
    --lr-warmup-iters 5
)

student() { # the flags of the user
    python train.py --hf-checkpoint "$STUDENT" "${TASK_ARGS[@]}" "${EVAL_ARGS[@]}" "${DISTILL_ARGS[@]}" \
        --run-dir "$OUT/student" "$@"
}

# a mistake in the flags is reported before the teacher's training, in whose place the student stands here, and before
# the last run is deleted
report=$(student --opd-teacher-load "$STUDENT" "$@" --dry-run 2>&1) || { echo "$report" >&2; exit 1; }
if [[ ! -f "$TEACHER/config.json" ]]; then
    rm -rf "$OUT/teacher"
    python train.py --hf-checkpoint "$STUDENT" "${TASK_ARGS[@]}" "${EVAL_ARGS[@]}" "${TEACHER_ARGS[@]}" \
        --run-dir "$OUT/teacher"
fi
rm -rf "$OUT/student"
student "$@"
