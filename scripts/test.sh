#!/usr/bin/env bash
# Set up .venv and run the linter, the type checker and the tests.   bash scripts/test.sh [pytest arguments]
# Without arguments, scripts/test_newest.sh follows: the tests marked newest, with the newest transformers and peft.
# The tests marked sglang start real SGLang servers, without a GPU on the CPU; -m 'not sglang and not vllm' leaves them
# out. Five markers are left out by default. REQUIRE_BROWSER=1 runs the tests marked browser, which need chromium or
# Google Chrome. REQUIRE_BWRAP=1 runs those marked bwrap, which need bubblewrap. REQUIRE_PODMAN=1 runs those marked
# podman, which need podman, and runc if cgroups are hybrid. REQUIRE_DOCKER=1 runs those marked docker, which build the
# Dockerfiles and need a Docker daemon and the network. REQUIRE_HUB=1 runs those marked hub, which need the package
# datasets (pip install -c constraints.txt -e '.[hub]').
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if compgen -G "/dev/nvidia[0-9]*" >/dev/null; then bash scripts/setup.sh --dev; else bash scripts/install_sglang_cpu.sh; fi
source scripts/lib/programs.sh
# several processes share the cores: more OpenMP threads than cores would slow all of them down
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
left_out="not vllm and not slow"
if [[ "${REQUIRE_BROWSER:-}" != 1 ]]; then
    left_out+=" and not browser"
    echo "the tests marked browser are left out; REQUIRE_BROWSER=1 runs them, and needs chromium"
fi
if [[ "${REQUIRE_BWRAP:-}" != 1 ]]; then
    left_out+=" and not bwrap"
    echo "the tests marked bwrap are left out; REQUIRE_BWRAP=1 runs them, and needs bubblewrap"
fi
if [[ "${REQUIRE_PODMAN:-}" != 1 ]]; then
    left_out+=" and not podman"
    echo "the tests marked podman are left out; REQUIRE_PODMAN=1 runs them, and needs podman"
fi
if [[ "${REQUIRE_DOCKER:-}" != 1 ]]; then
    left_out+=" and not docker"
    echo "the tests marked docker are left out, so the Dockerfiles are only checked for their form; REQUIRE_DOCKER=1 builds"
    echo "them, and needs a Docker daemon"
fi
if [[ "${REQUIRE_HUB:-}" != 1 ]]; then
    left_out+=" and not hub"
    echo "the tests marked hub are left out; REQUIRE_HUB=1 runs them, and needs the package datasets"
fi
ruff check .
ruff format --check .
mypy
# three processes, each with a file at a time, in the order of the names: on two cores a third one computes while the
# others wait for programs. -n 0 runs all tests in one
python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "$left_out" "$@"
if [[ $# -eq 0 ]]; then bash scripts/test_newest.sh; fi
