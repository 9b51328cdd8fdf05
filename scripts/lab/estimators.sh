#!/usr/bin/env bash
# Every advantage estimator on the quickstart's task, from the same SFT model: the table of docs/benchmarks.md.
#   bash scripts/lab/estimators.sh --launcher local                        ESTIMATORS="gspo ppo" SEEDS=0 bash scripts/lab/estimators.sh
# Runs are collected in runs/estimators-table/. The table is printed, and figures and curves go to docs/estimators/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RESULTS=runs/estimators-table
# two optimizer steps for each rollout: in the first the ratio is 1, so grpo, gspo and cispo have the same gradient
STEPS=(--global-batch-size 128)

declare -A FLAGS=(
    [grpo]=""
    [dr_grpo]="--disable-grpo-std-normalization --loss-aggregation constant"
    [gspo]="--advantage-estimator gspo --eps-clip 0.02 --eps-clip-high 0.03"
    [cispo]="--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 3.0"
    [rloo]="--advantage-estimator rloo"
    [reinforce_plus_plus]="--advantage-estimator reinforce_plus_plus"
    [reinforce_plus_plus_baseline]="--advantage-estimator reinforce_plus_plus_baseline"
    [ppo]="--advantage-estimator ppo"
)

for SEED in ${SEEDS:-0 1 2}; do
    export SEED
    sft=runs/estimators/sft/seed-$SEED
    # the quickstart itself is the first of them
    [[ -d "$sft/sft-model" ]] || OUT=$sft bash scripts/quickstart.sh --num-rollout 1 >/dev/null
    for name in ${ESTIMATORS:-grpo dr_grpo gspo cispo rloo reinforce_plus_plus reinforce_plus_plus_baseline ppo}; do
        echo "$name, seed $SEED: ${FLAGS[$name]}"
        # shellcheck disable=SC2086 # flags are words
        MODEL=$sft/sft-model OUT=runs/estimators/$name/seed-$SEED bash scripts/quickstart.sh ${FLAGS[$name]} "${STEPS[@]}" "$@" |
            grep -E "^done|eval/heldout"
        mkdir -p "$RESULTS/$name/seed-$SEED"
        cp "runs/estimators/$name/seed-$SEED/grpo/metrics.jsonl" "$RESULTS/$name/seed-$SEED/"
    done
done
source scripts/lib/programs.sh
python scripts/figures/estimators_table.py "$RESULTS" docs/estimators/curves.png
python scripts/figures/figures.py "$RESULTS"/*/seed-* >docs/estimators/figures.csv
