#!/usr/bin/env bash
# The quickstart with ten seeds, at twice its length: the numbers of docs/benchmarks.md.   bash scripts/lab/quickstart_seeds.sh
# Runs are collected in runs/quickstart-seeds/. The table is printed, and figures and curves go to docs/quickstart/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RESULTS=runs/quickstart-seeds
for SEED in ${SEEDS:-0 1 2 3 4 5 6 7 8 9}; do
    export SEED
    bash scripts/quickstart.sh --num-rollout 80 | grep -E "^done|eval/heldout"
    for part in sft grpo; do
        mkdir -p "$RESULTS/$part/seed-$SEED"
        cp "runs/quickstart/seed-$SEED/$part/metrics.jsonl" "$RESULTS/$part/seed-$SEED/"
    done
done
source scripts/lib/programs.sh
python scripts/figures/quickstart_table.py "$RESULTS" docs/quickstart/curves.png
python scripts/figures/figures.py "$RESULTS"/grpo/seed-* "$RESULTS"/sft/seed-* >docs/quickstart/figures.csv
