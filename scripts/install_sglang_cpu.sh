#!/usr/bin/env bash
# Add SGLang to .venv on a machine without a GPU, for the tests: the package, without its CUDA libraries.
#
# SGLang's own requirements are gigabytes that only a GPU can use. Installed here is what its server imports on the
# path of a dense model; tests/support/sglang_cpu/ stands in for the compiled rest. `pip check` will complain.
# With a GPU: pip install -c constraints.txt -e '.[sglang]', which scripts/setup.sh does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --dev
VENV=${VENV:-.venv}
PACKAGES=(
    apache-tvm-ffi compressed-tensors dill einops fastapi gguf ipython loguru msgspec openai orjson partial-json-parser
    pybase64 python-multipart pyzmq sentencepiece setproctitle soundfile uvicorn uvloop xgrammar
)

stamp="$VENV/.slimelite-sglang-$(cat constraints.txt "${BASH_SOURCE[0]}" | cksum | cut -d' ' -f1)"
[[ -e "$stamp" ]] && exit 0
echo "installing SGLang for a CPU ..."
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install -c constraints.txt --no-warn-conflicts "${PACKAGES[@]}"
pip install -c constraints.txt --no-deps sglang
touch "$stamp"
