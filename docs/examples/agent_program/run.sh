#!/usr/bin/env bash
# Train an openai-agents agent to use its tool.   SEED=0 bash docs/examples/agent_program/run.sh [flags of the RL run]
set -euo pipefail
SEED=${SEED:-0} OUT=${OUT:-runs/examples/openai_agents} AGENT=${AGENT:-agent}
source docs/examples/stages.sh
DATA=$OUT/data
[[ -d "$DATA" ]] || PYTHONPATH=. python docs/examples/tool/make.py "$DATA"
[[ -d "$AGENT" ]] || { python -m venv "$AGENT" && "$AGENT/bin/pip" install 'openai-agents==0.24.0'; }

SFT+=(--hf-checkpoint "$DATA/model" --prompt-data "$DATA/sft.parquet" --num-rollout "${SFT_ROLLOUTS:-30}")
RL+=(
    --agent-command "$AGENT/bin/python docs/examples/agent_program/calculator.py" --agent-programs 8
    --prompt-data environment:calculator --rollout-shuffle --rollout-max-response-len 24
    --rollout-max-context-len 128 --num-rollout 5 --rollout-batch-size 4 --lr 4e-3 --lr-warmup-iters 0
)
stages "$@"
