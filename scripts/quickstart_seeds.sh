#!/usr/bin/env bash
# The quickstart with ten seeds, at twice its length: the numbers of docs/benchmarks.md.   bash scripts/quickstart_seeds.sh
# Metrics of each run go to docs/quickstart/seed-N/; scripts/quickstart_table.py makes the table and the curves.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
RESULTS=docs/quickstart
# wall, and the CPU-seconds of the commands and of every process they started and waited for
TIMEFORMAT='%R %U %S'
for SEED in ${SEEDS:-0 1 2 3 4 5 6 7 8 9}; do
    export SEED
    mkdir -p "$RESULTS/seed-$SEED"
    { time bash scripts/quickstart.sh --num-rollout 80 >/dev/null 2>&1; } 2>"$RESULTS/seed-$SEED/seconds"
    cp "runs/quickstart/seed-$SEED/grpo/metrics.jsonl" "$RESULTS/seed-$SEED/"
    echo "seed $SEED: $(cat "$RESULTS/seed-$SEED/seconds") (wall, user, system seconds)"
done
PATH="$PWD/${VENV:-.venv}/bin:$PATH" python scripts/quickstart_table.py "$RESULTS"
