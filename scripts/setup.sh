#!/usr/bin/env bash
# Make .venv with the tested versions (constraints.txt).   bash scripts/setup.sh [--dev]
# With a GPU it installs torch for CUDA and SGLang, otherwise torch for CPUs. --dev adds the packages of the tests.
# It needs only Python >= 3.11. VENV=/elsewhere sets another folder. A finished environment is not changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
GPU=false; compgen -G "/dev/nvidia[0-9]*" >/dev/null && GPU=true
DEV=false; [[ "${1:-}" == "--dev" ]] && DEV=true

versions="$(cat constraints.txt pyproject.toml | cksum | cut -d' ' -f1)-gpu-$GPU"
stamp="$VENV/.slimelite-$versions-dev-$DEV" # lists the installed packages
packages() { (cd "$VENV" && ls -d lib/python*/site-packages/*.dist-info); }
if [[ -s "$stamp" ]]; then # stamps of earlier versions are empty
    gone=$(packages | grep -vxFf - "$stamp" || true)
    [[ -z "$gone" ]] && exit 0
    echo "$VENV does not have these packages any more, or has other versions; installing again:"
    basename -s .dist-info $gone
fi
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "slimelite needs Python 3.11 or newer; set PYTHON=" >&2; exit 1; }
[[ -x "$VENV/bin/python" ]] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

torch=$(sed -n 's/^torch==//p' constraints.txt)
if ! "$VENV/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$torch')" 2>/dev/null; then
    echo "installing torch $torch ..."
    if $GPU; then
        pip install "torch==$torch" # the default build of the package index is CUDA
    elif ! pip install "torch==$torch+cpu" 2>/dev/null; then
        # an index without the CPU build: uv knows where PyTorch keeps it
        pip install uv
        "$VENV/bin/python" -m uv pip install --quiet --python "$VENV/bin/python" --torch-backend cpu "torch==$torch" ||
            { echo "no CPU build found; installing the CUDA build (several GB)"; pip install "torch==$torch"; }
    fi
fi
echo "installing slimelite and its dependencies ..."
EXTRAS=""; $GPU && EXTRAS+=,sglang; $DEV && EXTRAS+=,dev
pip install -c constraints.txt -e ".${EXTRAS:+[${EXTRAS#,}]}"
$DEV && pip install --no-deps -c constraints.txt trl # tests read the chat templates in it; nothing imports it
packages | tee "$VENV/.slimelite-$versions-dev-false" "$VENV/.slimelite-$versions-dev-$DEV" >/dev/null
echo "$VENV is ready. To use it in a shell: source $VENV/bin/activate"
