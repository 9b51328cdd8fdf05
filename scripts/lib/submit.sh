# Sourced by the run scripts: `submit ARGS...` runs train.py where it belongs.
#
#   inside a Ray job            python train.py ARGS
#   RAY_ADDRESS=http://...      ray job submit to that cluster (its token in RAY_AUTH_TOKEN or ~/.ray/auth_token)
#   otherwise                   starts a Ray head on this machine with a token of its own, submits the job to it,
#                               and stops that head, and nothing else, at the end

# the environment of scripts/setup.sh, unless another one is active
submit_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ -z "${VIRTUAL_ENV:-}" && -x "$submit_root/.venv/bin/python" ]]; then export PATH="$submit_root/.venv/bin:$PATH"; fi

free_port() { python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

submit() {
    if [[ -n "${RAY_JOB_CONFIG_JSON_ENV_VAR:-}" ]]; then
        exec python "$submit_root/train.py" "$@"
    fi
    local argument
    for argument in "$@"; do
        # these start nothing, so they need no cluster
        if [[ "$argument" == --dry-run || "$argument" == --help ]]; then exec python "$submit_root/train.py" "$@"; fi
    done
    if [[ -z "${RAY_ADDRESS:-}" ]]; then start_head; fi
    # the job starts in the head's folder; relative paths in ARGS are meant from here
    ray job submit --address "$RAY_ADDRESS" -- \
        bash -c 'cd "$1" && shift && exec "$@"' job "$PWD" "$(command -v python)" "$submit_root/train.py" "$@"
}

start_head() {
    export RAY_AUTH_MODE=token
    RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
    export RAY_AUTH_TOKEN
    local dashboard log
    dashboard=$(free_port)
    log=$(mktemp)
    ray start --head --block --port "$(free_port)" --dashboard-host 127.0.0.1 --dashboard-port "$dashboard" \
        --disable-usage-stats >"$log" 2>&1 &
    RAY_HEAD_PID=$!
    trap 'kill -TERM "$RAY_HEAD_PID" 2>/dev/null; wait "$RAY_HEAD_PID" 2>/dev/null' EXIT
    export RAY_ADDRESS="http://127.0.0.1:$dashboard"
    echo "starting a Ray head at $RAY_ADDRESS (log: $log)"
    local waited
    for ((waited = 0; waited < 90; waited++)); do
        # the dashboard answers before the agent that runs jobs is there: an empty job tells when it is
        if ray job submit --no-wait --address "$RAY_ADDRESS" -- true >/dev/null 2>&1; then return; fi
        kill -0 "$RAY_HEAD_PID" 2>/dev/null || { cat "$log" >&2; exit 1; }
        sleep 1
    done
    echo "the Ray head did not answer at $RAY_ADDRESS within 90 s; its log:" >&2
    cat "$log" >&2
    exit 1
}
