#!/usr/bin/env bash
# Runs clients against the HTTP front: from PyPI, and from npm if it is installed. Each runs twice: with a scripted model,
# and with the embedded engine, whose tiny model is held to the same replies. Each has its own environment, because the
# requirements of clients and of SGLang exclude each other. With --record it also saves the requests that they send, and
# writes the table of docs/serving.md. Continuous integration repeats these requests without the clients
# (tests/serving/test_recorded_clients.py).
#
#   bash scripts/test_clients.sh [--record [client]]     # --table writes only the table
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python
record=${1:-} only=${2:-}
table() { [ "$record" = "" ] || "$python" -m tests.serving.clients.table; }
[ "$record" != --table ] || { table; exit 0; }
trap table EXIT
wanted() { [ "$only" = "" ] || [ "$only" = "$1" ]; }
run() {  # name, command…: beside the servers, which may record what they are asked
  local options=()
  [ "$record" = --record ] && options=(--record "tests/serving/recorded/$1.json")
  # the client's environment must not see this package's
  "$python" -m tests.serving.clients.server "${options[@]}" env -u PYTHONPATH "${@:2}"
}
client() {  # name, package==version…: a client of Python
  wanted "$1" || return 0
  local home=.venv-clients/$1-${2##*=}
  if [ ! -e "$home/done" ]; then
    "$python" -m venv --clear "$home"
    "$home/bin/pip" install --quiet "${@:2}"
    touch "$home/done"
  fi
  run "$1" "$home/bin/python" "tests/serving/clients/with_${1//-/_}.py"
}
program() {  # name, package@version… -- its command: a client of Node, where @home@ is the folder of its packages
  wanted "$1" || return 0
  local name=$1 packages=() home=$PWD/.venv-clients/$1-${2##*@}
  while shift && [ "$1" != -- ]; do packages+=("$1"); done
  shift
  if [ ! -e "$home/done" ]; then
    npm install --silent --prefix "$home" "${packages[@]}"
    touch "$home/done"
  fi
  run "$name" "${@//@home@/$home}"
}
client openai openai==3.54.0
client anthropic anthropic==2.12.0
client openai-agents openai-agents==0.24.0
client pydantic-ai "pydantic-ai-slim[openai]==2.68.0"
client inspect inspect-ai==0.3.285 openai==3.54.0 anthropic==2.12.0
client langgraph langgraph==1.2.22 langchain==1.4.7 langchain-openai==1.7.3
client litellm litellm==1.106.2 mcp==2.3.0
client smolagents "smolagents[openai]==1.26.0"
client dspy dspy==3.4.1
client instructor instructor==1.17.0
client lm-eval "lm-eval[api]==0.4.13" transformers==5.12.1 "huggingface-hub>=1.5,<2"
client aider aider-chat==0.86.2
client mini-swe-agent mini-swe-agent==2.4.6 litellm==1.106.2 mcp==2.3.0
command -v npm > /dev/null || exit 0
npm_client() {  # name, module, the name of its program, package@version: a program that is driven from Python
  program "$1" "$4" -- "$python" -m "tests.serving.clients.with_$2" "@home@/node_modules/.bin/$3"
}
program ai-sdk ai@6.0.326 @ai-sdk/openai@3.0.141 zod@4.6.7 -- \
  env --chdir "@home@" node "$PWD/tests/serving/clients/with_ai_sdk.mjs"
npm_client claude-code claude_code claude @anthropic-ai/claude-code@2.1.197
npm_client codex codex codex @openai/codex@0.169.0
npm_client opencode opencode opencode opencode-ai@1.18.33
npm_client qwen-code qwen_code qwen @qwen-code/qwen-code@0.24.4
