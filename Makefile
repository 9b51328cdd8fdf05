# `make` lists the tasks. Each is one command that also stands in the docs.
SHELL := bash
BIN := $(or $(VENV),.venv)/bin

help: ## list the tasks
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

setup: ## .venv with the tested versions and what the tests need
	bash scripts/install_sglang_cpu.sh

test: ## linter, type checker and the whole suite: what continuous integration runs
	bash scripts/test.sh

quick: ## linter, type checker and the tests that start no run
	bash scripts/test.sh -m 'not e2e and not sglang and not vllm' tests/algorithms tests/arguments tests/data \
	    tests/rewards tests/tracking tests/test_house_rules.py tests/samples

lint: ## linter, formatter and type checker
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: ## pages that are generated
	$(BIN)/python scripts/dev/generate_argument_docs.py

site: ## docs/ as a site in build/site
	@[[ -x $(BIN)/mkdocs ]] || { echo "mkdocs is not installed: bash scripts/setup.sh --dev installs it"; exit 1; }
	$(BIN)/mkdocs build --strict

.PHONY: help setup test quick lint docs site
