# The only door: what can be done here, and how. `make` alone prints it.
# Paths are relative, so `make -C DIR target` works from any folder, also where DIR has spaces.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules
SHELL := /bin/sh

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Names tried in turn for a Python of 3.11 or later; `make PYTHON=/path/to/python setup` takes that one.
PYTHON ?=
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python)
# Two workers by default: more do not help on two cores and disturb the tests that measure time.
WORKERS ?= 2
ARGS ?=

# A copied or moved checkout has a .venv that points to the old place: make it anew.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
endif

##@ Use
.PHONY: help setup demo
help: ## print this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z%-]+:.*## / {gsub("%", "NAME", $$1); printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## make .venv with the locked packages and the commands (only if something changed)

demo: $(READY) ## place, run, track and judge real tasks on a real bus, in about 45 s
	$(BIN)/laxity demo $(ARGS)

##@ Prove
.PHONY: check test test-slow test-docker test-kubernetes chaos chaos-kubernetes lint types layers docs-check
check: lint types layers docs-check demo test-slow test test-docker test-kubernetes ## all that must hold before a change lands (what .ci/run runs)

test: $(READY) ## run the tests, all but the slow ones and those on Docker or Kubernetes (ARGS="-k name" to choose)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not docker and not kubernetes" $(ARGS)

test-slow: $(READY) ## run the tests that need minutes: the demo, with each process killed in turn, and chaos with 600 requests
	$(BIN)/python -m pytest -m "slow and not kubernetes" $(ARGS)

# 75 says that no engine can be had here, and why: then the tests are run all the same, skipped and counted.
test-docker: $(READY) ## run the tests that need a Docker engine, on one that answers or on one that it starts
	.ci/docker-engine with $(BIN)/python -m pytest -m docker $(ARGS) || \
	  { [ $$? -eq 75 ] && $(BIN)/python -m pytest -m docker $(ARGS); }

# The same: 75 says that no Kubernetes can be had here, and why.
test-kubernetes: $(READY) ## run the tests that need a Kubernetes, on one that it finds or builds: control plane and kubelet
	.ci/kubernetes with $(BIN)/python -m pytest -m kubernetes $(ARGS) || \
	  { [ $$? -eq 75 ] && $(BIN)/python -m pytest -m kubernetes $(ARGS); }

chaos: $(READY) ## kill placers under 5,000 requests, check every commit (LAXITY_CHAOS_SEED, LAXITY_CHAOS_REQUESTS)
	LAXITY_CHAOS_REQUESTS=$${LAXITY_CHAOS_REQUESTS:-5000} $(BIN)/python -m pytest -m slow -s tests/e2e/test_chaos.py $(ARGS)

chaos-kubernetes: $(READY) ## kill Kubernetes, Laxity and NATS in turn under 100 pods (LAXITY_CHAOS_SEED, LAXITY_CHAOS_PODS)
	LAXITY_CHAOS_PODS=$${LAXITY_CHAOS_PODS:-100} \
	  .ci/kubernetes with $(BIN)/python -m pytest -s tests/kubernetes/test_kubernetes_chaos.py $(ARGS)

lint: $(READY) ## look for what ruff finds, in form and in content
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## check the types, strictly
	$(BIN)/mypy

layers: $(READY) ## check which module may import which
	$(BIN)/lint-imports --no-logo --cache-dir build/import-linter

docs-check: $(READY) ## check that the generated documents are up to date
	$(BIN)/python -m cli.generate_docs --check

bench-%: $(READY) ## measure NAME; writes build/bench/NAME.json
	$(BIN)/python -m bench.$(subst -,_,$*) $(ARGS)

##@ Change
.PHONY: format docs lock clean
format: $(READY) ## put the code into its one form
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

docs: $(READY) ## write docs/messages.md and the AsyncAPI document from the models
	$(BIN)/python -m cli.generate_docs

# uv has no PIP_* settings: an index chosen for pip is handed to it, and written nowhere.
lock: $(READY) ## take the newest versions that pyproject.toml allows (ARGS="-P numpy": only that one)
	$(if $(PIP_INDEX_URL),UV_DEFAULT_INDEX="$(PIP_INDEX_URL)") $(BIN)/uv pip compile --quiet pyproject.toml --group dev \
	  --universal --python-version 3.11 --fork-strategy fewest --generate-hashes --no-emit-index-url \
	  --annotation-style line --custom-compile-command "make lock" $(or $(ARGS),--upgrade) -o requirements.lock

clean: ## remove what was built, but not .venv
	rm -rf build dist .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------------
# Both distributions are installed from here without their dependencies, which the lock has brought. Where there is a
# compiler and Python.h each compiles a part of itself beside its source; elsewhere they do without.
$(READY): requirements.lock pyproject.toml setup.py \
  services/placer/core/_kernels.c services/placer/core/_rankings.h sdk/pyproject.toml sdk/setup.py sdk/src/laxity/_fast.c
	@.ci/make-venv $(VENV) $(PYTHONS)
	@echo 'installing the locked packages (about a minute)'
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e . -e ./sdk
	@printf '%s' "$(CURDIR)" > $@
