#!/usr/bin/env bash
# Run one of slime's launch scripts unchanged. Its job runs on the train.py of this folder.
#
#   bash scripts/run_slime_script.sh [--map /root=/data]... path/to/run-qwen3-4B.sh [flags...]
#
# Your flags come after the script's own flags, so yours override the script's. --dry-run checks the script and starts nothing.
# --map /root=/data changes /root/... in the script's arguments to /data/....
#
# For that script alone, these commands are replaced. `pkill`, `killall` and `ray stop` end nothing. `ray start` starts
# nothing, because train.py starts its own Ray or uses that of RAY_ADDRESS. `ssh`, `pdsh`, `srun`, `mpirun` and the like
# run nothing, here or on another machine: you join the nodes by hand (docs/cluster.md). `sudo pkill` is `pkill`.
# `ray job submit -- python3 train.py ...` and `python3 train.py ...` run train.py here. Every other `python3` is the
# real one. Each replacement is printed.
#
# A Python launcher of miles (run_qwen3_4b.py, followed by its own options) starts no training. Instead, the
# corresponding train.py command is printed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z "${VIRTUAL_ENV:-}" && -x "$here/.venv/bin/python" ]]; then export PATH="$here/.venv/bin:$PATH"; fi

SLIME_MAP=""
while [[ "${1:-}" == --map ]]; do
    [[ "${2:-}" == /*=* ]] || { echo "--map takes FROM=TO, such as /root=/data, not '${2:-}'" >&2; exit 2; }
    from=${2%%=*} to=${2#*=}
    SLIME_MAP+="${from%/}=${to%/}"$'\n'
    shift 2
done
if (($# == 0)) || [[ "$1" == -* ]]; then sed -n '2,5p' "${BASH_SOURCE[0]}" >&2; exit 2; fi
script=$1
shift
[[ -f "$script" ]] || { echo "$script: no such script" >&2; exit 2; }

if [[ "$script" == *.py ]]; then # one of miles's Python launchers
    export SLIME_MAP SLIME_SHIMS="" SLIME_ROOT="$here"
    exec python "$here/scripts/lib/miles_launcher.py" "$script" "$@"
fi

shims=$(mktemp -d)
trap 'rm -rf "$shims"' EXIT
export SLIME_MAP SLIME_SHIMS="$shims" SLIME_ROOT="$here"
printf '%s\0' "$@" >"$shims/flags"
for name in ray pkill killall sudo python python3 ssh pdsh pssh parallel-ssh clush srun mpirun mpiexec; do
    printf '#!/bin/sh\nexec "%s" "%s" %s "$@"\n' "$(command -v python)" "$here/scripts/lib/slime_shims.py" "$name" >"$shims/$name"
    chmod +x "$shims/$name"
done
PATH="$shims:$PATH" BASH_ENV="$here/scripts/lib/slime_source.sh" bash "$script"
