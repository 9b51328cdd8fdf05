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
        if [[ "$argument" =~ ^(--dry-run|-h|--help|--help-all)$ ]]; then exec python "$submit_root/train.py" "$@"; fi
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
    # after `ray job stop` a run has this long to end its workers and draw its curves; by default 3 s
    export RAY_JOB_STOP_WAIT_TIME_S=30
    local dashboard log
    dashboard=$(free_port)
    log=$(mktemp)
    # ports of its own throughout: another Ray on this machine has the default ones
    ray start --head --block --port "$(free_port)" --dashboard-host 127.0.0.1 --dashboard-port "$dashboard" \
        --dashboard-agent-listen-port "$(free_port)" --metrics-export-port "$(free_port)" \
        --disable-usage-stats >"$log" 2>&1 &
    RAY_HEAD_PID=$!
    # a stopped head exits with 1, which is not the script's status
    trap 'kill -TERM "$RAY_HEAD_PID" 2>/dev/null; wait "$RAY_HEAD_PID" 2>/dev/null || true' EXIT
    export RAY_ADDRESS="http://127.0.0.1:$dashboard"
    echo "starting a Ray head at $RAY_ADDRESS (log: $log)"
    local deadline=$((SECONDS + 120)) answer=""
    while ((SECONDS < deadline)); do
        # the dashboard answers before the agent that runs jobs is there: an empty job tells when it is
        if answer=$(ray job submit --no-wait --address "$RAY_ADDRESS" -- true 2>&1); then return; fi
        kill -0 "$RAY_HEAD_PID" 2>/dev/null || break
        sleep 1
    done
    echo "the Ray head at $RAY_ADDRESS takes no jobs: ${answer##*$'\n'}; its log:" >&2
    cat "$log" >&2
    exit 1
}
