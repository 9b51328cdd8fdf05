#!/usr/bin/env bash
# Prove the GPU paths on a machine with a GPU, offline, in three calls of at most ten minutes each:
#
#   bash scripts/gpu/gpu_check.sh --call 1     kernels, an optimizer step, the parts of GRPO, the engine
#   bash scripts/gpu/gpu_check.sh --call 2     learning, colocation, SGLang, speed, the machine
#   bash scripts/gpu/gpu_check.sh --call 3     seconds and memory of models from 0.5B to 32B: predicted and measured
#   bash scripts/gpu/gpu_check.sh --device cpu --tiny        (tries the checks themselves, without a GPU)
#
# Without --call it makes all three calls. --out sets the folder of the results, and PYTHON=... the interpreter.
#
# It needs the packages of pyproject.toml without Ray, and downloads nothing, because weights are random. SGLang is
# checked if it is installed. The output is a line for each check and a table; results.json and logs are in --out. The
# exit status is 0 if nothing failed. docs/gpu_status.md says what it proves.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" # one GPU, where there are several
exec "${PYTHON:-python3}" scripts/gpu/gpu_check.py "$@"
