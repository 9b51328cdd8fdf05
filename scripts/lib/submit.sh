# The run scripts source this. `submit ARGS...` runs train.py in one of three places:
#
#   inside a Ray job            python train.py ARGS
#   RAY_ADDRESS=http://...      ray job submit to that cluster (its token in RAY_AUTH_TOKEN or ~/.ray/auth_token)
#   otherwise                   start a Ray head on this machine with its own token, submit the job to it, and at
#                               the end stop only that head

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
        # these flags start nothing, so they need no cluster
        if [[ "$argument" =~ ^(--dry-run|-h|--help|--help-all)$ ]]; then exec python "$submit_root/train.py" "$@"; fi
    done
    if [[ -z "${RAY_ADDRESS:-}" ]]; then start_head; fi
    # the job starts in the head's folder, but relative paths in ARGS are relative to this folder
    ray job submit --address "$RAY_ADDRESS" -- \
        bash -c 'cd "$1" && shift && exec "$@"' job "$PWD" "$(command -v python)" "$submit_root/train.py" "$@"
}

start_head() {
    export RAY_AUTH_MODE=token
    RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
    export RAY_AUTH_TOKEN
    # after `ray job stop` a run has this long to end its workers and draw its curves; Ray's default is 3 s
    export RAY_JOB_STOP_WAIT_TIME_S=30
    local dashboard log
    dashboard=$(free_port)
    log=$(mktemp)
    # every port is a free one, because another Ray on this machine may use the default ports
    ray start --head --block --port "$(free_port)" --dashboard-host 127.0.0.1 --dashboard-port "$dashboard" \
        --dashboard-agent-listen-port "$(free_port)" --metrics-export-port "$(free_port)" \
        --disable-usage-stats >"$log" 2>&1 &
    RAY_HEAD_PID=$!
    # a stopped head exits with 1, which is not the script's status
    trap 'kill -TERM "$RAY_HEAD_PID" 2>/dev/null; wait "$RAY_HEAD_PID" 2>/dev/null || true' EXIT
    export RAY_ADDRESS="http://127.0.0.1:$dashboard"
    echo "starting a Ray head at $RAY_ADDRESS (log: $log)"
    local begin=$SECONDS most=300 said=0 answer=""
    while ((SECONDS < begin + most)); do
        # the dashboard answers before the agent that runs jobs is ready; an empty job shows when that is ready
        if answer=$(ray job submit --no-wait --address "$RAY_ADDRESS" -- true 2>&1); then return; fi
        kill -0 "$RAY_HEAD_PID" 2>/dev/null || break
        if ((SECONDS - begin >= said + 30)); then
            said=$((SECONDS - begin))
            echo "waiting for the Ray head to take jobs, ${said}s of ${most}s"
        fi
        sleep 1
    done
    echo "the Ray head at $RAY_ADDRESS takes no jobs: ${answer##*$'\n'}; its log:" >&2
    cat "$log" >&2
    exit 1
}
