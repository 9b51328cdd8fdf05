# Source this in the repository's root. Programs then come from the environment of scripts/setup.sh (.venv or VENV).
VENV=${VENV:-.venv}
[[ "$VENV" == /* ]] || VENV=$PWD/$VENV
export PATH="$VENV/bin:$PATH"
