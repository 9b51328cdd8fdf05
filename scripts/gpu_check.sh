#!/usr/bin/env bash
# Prove the GPU paths on a machine with one GPU: correctness, learning, colocation, speed. Offline, in at most 10 minutes.
#
#   bash scripts/gpu_check.sh --out gpu_check                 (PYTHON=... names another interpreter)
#   bash scripts/gpu_check.sh --out check --device cpu --tiny (the same checks, tiny, without a GPU)
#
# Needs the packages of pyproject.toml, Ray and SGLang excepted, and no downloads: weights are random. Prints a line for
# every check and a table; --out gets results.json and the logs. Exit status 0: nothing failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
