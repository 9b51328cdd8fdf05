#!/usr/bin/env bash
# Prove the GPU paths on a machine with a GPU: correctness, learning, colocation, speed. Offline, at most 10 minutes.
#
#   bash scripts/gpu_check.sh [--out runs/gpu_check]     (PYTHON=... names the interpreter)
#   bash scripts/gpu_check.sh --device cpu --tiny        (tries the checks themselves, without a GPU)
#
# Needs the packages of pyproject.toml, without Ray, and no downloads: weights are random; with SGLang where it is
# installed. A line for each check and a
# table; results.json and logs in --out. Exit status 0: nothing failed. docs/gpu_status.md says what it proves.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" # one GPU, where there are several
exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
