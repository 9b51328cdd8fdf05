# Sourced in the repository's root: programs are those of scripts/setup.sh's environment, .venv or VENV.
VENV=${VENV:-.venv}
[[ "$VENV" == /* ]] || VENV=$PWD/$VENV
export PATH="$VENV/bin:$PATH"
