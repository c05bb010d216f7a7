# Targets a person runs: `make help`. Every path is relative, so the tree may lie in a folder of any name, spaces included.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

# The interpreter that .venv is made with: `make test PYTHON=python3.12`.
PYTHON ?= python3
# Passed on to what the target runs: `make test ARGS="tests/fakes -k lookup -x"`.
ARGS ?=
# Worker processes of `make test`: one more than two cores, because many tests wait for sockets and deadlines.
# 0 runs the tests in one process, which a debugger needs.
JOBS ?= 3

BIN := .venv/bin
RUN := $(BIN)/python -P
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# .venv is finished when these exist; each is older than nothing it was made from.
INSTALLED := .venv/requirements.stamp
READY := .venv/package.stamp

.PHONY: help demo test lint format bench soak gpu-test mutants venv clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' Makefile | column -t -s '|'

demo: $(READY)  ## train a sharded model, inject faults, name every lost row
	@$(BIN)/deltaproof demo $(ARGS)

test: $(READY)  ## the test suite (JOBS=0: one process; ARGS: passed to pytest)
	@$(RUN) -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

lint: $(READY)  ## ruff format, ruff check, mypy
	@$(RUN) -m ruff format --check --quiet . || { echo "lint: not formatted as ruff does it: make format" >&2; exit 1; }
	@$(RUN) -m ruff check .
	@bash ci/typecheck $(BIN)/python

format: $(READY)  ## let ruff format the tree and mend what it can
	@$(RUN) -m ruff check --fix-only --quiet .
	@$(RUN) -m ruff format .

bench: $(READY)  ## every benchmarks/bench_*.py
	@shopt -s nullglob; files=(benchmarks/bench_*.py); \
	[ $${#files[@]} -gt 0 ] || { echo "bench: no benchmarks/bench_*.py in this tree" >&2; exit 2; }; \
	for file in "$${files[@]}"; do echo "== $$file"; $(BIN)/python "$$file" $(ARGS); done

soak: $(READY)  ## the tests that take minutes
	@$(RUN) -m pytest -m soak --timeout 3600 $(ARGS)

# Worker processes of `make mutants`; unset: one per core.
MUTANTS_JOBS ?=
mutants: $(READY)  ## whether the tests notice wrong code in reference/ (ARGS="--files delta.py"; report: build/mutants)
	@$(RUN) ci/mutants.py $(if $(MUTANTS_JOBS),--jobs $(MUTANTS_JOBS)) $(ARGS)

# On a machine whose torch is not in .venv: `make gpu-test GPU_PYTHON=python3` builds nothing and needs no install.
GPU_PYTHON ?=
gpu-test: $(if $(GPU_PYTHON),,$(READY))  ## the tests that need CUDA (GPU_PYTHON: another interpreter)
	@bash ci/link_package build/link
	@PYTHONPATH="build/link$${PYTHONPATH:+:$$PYTHONPATH}" $(or $(GPU_PYTHON),$(BIN)/python) -P -m pytest -m gpu $(ARGS)

venv: $(READY)  ## .venv with everything pinned in requirements/, and this tree installed editable

$(INSTALLED): $(wildcard requirements/*.txt)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	{ echo "make: deltaproof needs Python 3.11 or newer, and '$(PYTHON)' is not one: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	{ echo "make: '$(PYTHON)' cannot make virtual environments: install its venv module (Debian: python3-venv)" >&2; exit 2; }
	@echo "make: installing into .venv what requirements/ pins (minutes the first time)"
	@"$(PYTHON)" -m venv .venv
	@$(PIP) install -r requirements/torch-cpu.txt
	@$(PIP) install --no-deps -r requirements/torchrec.txt
	@touch $@

$(READY): $(INSTALLED) pyproject.toml
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

clean:  ## build outputs and caches; .venv stays (rm -r .venv)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
