#!/usr/bin/env bash
# Runs the official clients of OpenAI and Anthropic, openai-agents, pydantic-ai, inspect, and, where npm is there, the
# AI SDK, Claude Code and Codex against the HTTP front, each in an environment of its own, since their requirements
# exclude SGLang's. With --record it also writes down the requests that they send, which continuous integration repeats
# without them (tests/serving/test_recorded_clients.py).
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
client() {  # name, package==version…: a client of Python
  local home=.venv-clients/$1-${2##*=}
  if [ ! -e "$home/done" ]; then
    "$python" -m venv --clear "$home"
    "$home/bin/pip" install --quiet "${@:2}"
    touch "$home/done"
  fi
  run "$1" "$home/bin/python" "tests/serving/clients/with_${1//-/_}.py"
}
program() {  # name, package@version…: a client of Node; sets home to the folder of its packages
  home=$PWD/.venv-clients/$1-${2##*@}
  if [ ! -e "$home/done" ]; then
    npm install --silent --prefix "$home" "${@:2}"
    touch "$home/done"
  fi
}
client openai openai==3.54.0
client anthropic anthropic==2.12.0
client openai-agents openai-agents==0.24.0
client pydantic-ai "pydantic-ai-slim[openai]==2.68.0"
client inspect inspect-ai==0.3.285 openai==3.54.0 anthropic==2.12.0
command -v npm > /dev/null || exit 0
program ai-sdk ai@6.0.326 @ai-sdk/openai@3.0.141 zod@4.6.7
run ai-sdk env --chdir "$home" node "$PWD/tests/serving/clients/with_ai_sdk.mjs"
program claude-code @anthropic-ai/claude-code@2.1.197
run claude-code "$python" -m tests.serving.clients.with_claude_code "$home/node_modules/.bin/claude"
program codex @openai/codex@0.169.0
run codex "$python" -m tests.serving.clients.with_codex "$home/node_modules/.bin/codex"
