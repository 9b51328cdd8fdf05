#!/usr/bin/env bash
# Five runs of the quickstart, each with one fault that the alarms must find.   bash scripts/lab/planted_faults.sh
#
#   length  a reward that pays for length          label   a label column that is not the answer
#   lr      a learning rate 100 times too high     filter  a filter that drops every group (the run ends by itself)
#   stale   an engine that never gets new weights
#
# Runs are in runs/planted-faults/NAME/grpo. The script prints a table of their alarms. The exit status is 1 if a fault
# was not found. If there are runs of scripts/lab/quickstart_seeds.sh, it checks that they have no alarm.
# MODEL=an/SFT/model is the model that all runs start from; by default the quickstart makes it. It takes five minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash scripts/setup.sh
source scripts/lib/programs.sh
DATA=${DATA:-data/quickstart}
RESULTS=${RESULTS:-runs/planted-faults}
export MODEL=${MODEL:-runs/quickstart/seed-0/sft-model}
[[ -d "$MODEL" ]] || MODEL="" bash scripts/quickstart.sh
rm -rf "$RESULTS"
mkdir -p "$RESULTS"

cat >"$RESULTS/faults.py" <<'PYTHON'
async def pays_for_length(args, sample, **_):
    return sample.response_length / args.rollout_max_response_len


def drops_every_group(args, samples, **_):
    return False
PYTHON

cat >"$RESULTS/true_eval.yaml" <<YAML
eval:
  datasets:
    heldout: {path: $DATA/heldout.parquet, rm_type: gsm8k, top_k: 1}
YAML

python - "$DATA" "$RESULTS" <<'PYTHON'
import sys

import pyarrow as pa
import pyarrow.parquet as pq

for name in ("train", "heldout"):
    table = pq.read_table(f"{sys.argv[1]}/{name}.parquet")
    row = pa.array([str(i) for i in range(len(table))])
    pq.write_table(table.append_column("row", row), f"{sys.argv[2]}/{name}.parquet")
PYTHON

run() { # NAME FLAGS...: a run that fails is in the table, too
    echo "== $1"
    OUT="$RESULTS/$1" bash scripts/quickstart.sh --launcher local "${@:2}" | grep -A1 "alarm" || true
}
run length --custom-rm-path "$RESULTS/faults.py:pays_for_length" --eval-config "$RESULTS/true_eval.yaml"
run label --prompt-data "$RESULTS/train.parquet" --eval-prompt-data heldout "$RESULTS/heldout.parquet" --label-key row
run lr --lr 0.1
run filter --dynamic-sampling-filter-path "$RESULTS/faults.py:drops_every_group"
run stale --async-rollout --update-weights-interval 1000
python scripts/lab/planted_faults_table.py "$RESULTS" runs/quickstart-seeds
