#!/usr/bin/env bash
# Runs the official clients of OpenAI and Anthropic, openai-agents, pydantic-ai, and, where npm is there, Claude Code and
# Codex against the HTTP front, each in an environment of its own, since their requirements exclude SGLang's. With
# --record it also writes down the requests that they send, which continuous integration repeats without them
# (tests/serving/test_recorded_clients.py).
#
#   bash scripts/test_clients.sh [--record]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python
record=${1:-}
run() {  # name, command…: beside the servers, which may record what they are asked
  local options=()
  [ "$record" = --record ] && options=(--record "tests/serving/recorded/$1.json")
  # the client's environment must not see this package's
  "$python" -m tests.serving.clients.server "${options[@]}" env -u PYTHONPATH "${@:2}"
}
for pin in openai==3.54.0 anthropic==2.12.0 openai-agents==0.24.0 "pydantic-ai-slim[openai]==2.68.0"; do
  name=${pin%%[=[]*} name=${name%-slim}
  home=.venv-clients/$name-${pin##*=}
  if [ ! -e "$home/done" ]; then
    "$python" -m venv --clear "$home"
    "$home/bin/pip" install --quiet "$pin"
    touch "$home/done"
  fi
  run "$name" "$home/bin/python" "tests/serving/clients/with_${name//-/_}.py"
done
command -v npm > /dev/null || exit 0
for pin in claude-code/@anthropic-ai/claude-code@2.1.197 codex/@openai/codex@0.169.0; do
  name=${pin%%/*} package=${pin#*/}
  home=.venv-clients/$name-${package##*@}
  if [ ! -e "$home/done" ]; then
    npm install --silent --prefix "$home" "$package"
    touch "$home/done"
  fi
  programs=("$home"/node_modules/.bin/*)
  run "$name" "$python" -m "tests.serving.clients.with_${name//-/_}" "${programs[0]}"
done
