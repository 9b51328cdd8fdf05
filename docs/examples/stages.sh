# SFT, then RL, of a model of 120,000 parameters. The scripts of these examples share this file.
#   SEED=0 OUT=runs/examples/tool; source docs/examples/stages.sh; SFT+=(…) RL+=(…); stages [flags of the RL run]
COMMON=(--launcher local --use-dynamic-batch-size --max-tokens-per-gpu 16384 --seed "$SEED" --rollout-seed "$SEED")
SFT=(
    --input-key messages --loss-type sft_loss --rollout-batch-size 2400 --global-batch-size 64 --rollout-shuffle
    --optimizer muon --muon-lr 0.02 --lr 5e-3 --lr-decay-style linear --save-hf "$OUT/sft-model"
)
RL=(--hf-checkpoint "$OUT/sft-model" --n-samples-per-prompt 8 --lr 1e-3 --lr-warmup-iters 5)

stages() {
    [[ -d "$OUT/sft-model" ]] || python train.py "${COMMON[@]}" "${SFT[@]}" --run-dir "$OUT/sft"
    python train.py "${COMMON[@]}" "${RL[@]}" --run-dir "$OUT/rl" "$@"
}
