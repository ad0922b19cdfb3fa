# One tool call per target; `make help` lists them. PYTHON chooses the interpreter that makes .venv.
PYTHON := $(firstword $(shell command -v python3.11 python3.12 python3))
CONFIG := laptop
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup native serve model test lint type arch ci accept-main accept-engine accept-sampling accept-transfer bench-engine gpu-check

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with everything in it (nothing to do the second time)
	@$(PYTHON) -m cluster.cli.install

native: setup  ## build the CPU kernels (pip does, too; an edit of a source needs it again)
	@$(BIN)/python workers/native/build.py

serve: setup  ## start the cluster on this machine: make serve PORT=8123
	@$(BIN)/baton serve --config $(CONFIG) $(if $(PORT),--port $(PORT))

model: setup  ## download and convert the model without starting anything
	@$(BIN)/baton fetch $(CONFIG)

test: model  ## run all tests
	@$(BIN)/python workers/native/build.py || true  # kernels of other sources would only be skipped
	@$(BIN)/python -m pytest

lint: setup  ## ruff: rules and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

type: setup  ## mypy, strict
	@$(BIN)/mypy

arch: setup  ## import layers, sizes, names, documents
	@$(BIN)/lint-imports && $(BIN)/python -m pytest -q tests/architecture

ci: lint type arch  ## everything that must hold before a merge
	@$(BIN)/pip check && $(MAKE) --no-print-directory test

gpu-check: setup  ## what only a GPU can prove, one line per step, under four minutes
	@$(BIN)/python -m tests.gpu.check

accept-main: model  ## the acceptance of the main job, unbounded
	@$(BIN)/python -m pytest --full tests/accept/main tests/ray

accept-sampling: model  ## the acceptance of sampling, as far as it is built
	@$(BIN)/python -m pytest --full tests/accept/sampling tests/unit/workers/sampling

accept-transfer: model  ## the acceptance of KV transfer, as far as it is built
	@$(BIN)/python -m pytest --full tests/accept/transfer tests/contract/kv_transfer tests/property/kv_transfer

accept-engine: model  ## the acceptance of the engine, unbounded
	@$(BIN)/python workers/native/build.py || true
	@$(BIN)/python -m pytest --full tests/accept/engine tests/property/workers

bench-engine: model  ## engine, peers, limits, quality, cluster: tables, build/bench/engine.json, docs (40 min)
	@$(BIN)/python -m tests.bench.engine $(BENCH)
