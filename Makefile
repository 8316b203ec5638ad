# Everything lives in .venv in this checkout. `make` alone lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo test test-compose lint audit format lock chaos soak bench-hub bench-weights bench-async bench-trainer bench-learning clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOG := $(VENV)/install.log
CONSTRAINTS := $(VENV)/constraints.txt
EXTRAS := hub,agents,trainer,lora,trackers,standalone,examples,bench,dev
IS_PYTHON := -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do $$name $(IS_PYTHON) && echo $$name && break; done)
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

# The exact torch comes first and stays: a looser request would fetch gigabytes of CUDA libraries.
TORCH := torch==2.13.0
# Without what they ask for: the first wants CUDA packages, the second a web interface that its server does not need.
BARE := sglang==0.5.23 openenv-core==0.3.0

LOCKS := deploy/requirements
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header -c $(VENV)/tested.txt pyproject.toml
# Packages that come with the build of torch that an image has.
WITH_TORCH := torch|triton|nvidia|cuda

# $(call step,what it does,command): one line with the seconds it took; the command's output only if it fails.
define step
	@printf '%-58s' '$(1) …'; start=$$SECONDS; \
	if { $(2); } > $(LOG) 2>&1; then echo "$$((SECONDS - start)) s"; else echo failed; cat $(LOG) >&2; exit 1; fi
endef

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(STAMP) ## set everything up in .venv (2 to 5 minutes, 3.5 GB)

$(STAMP): pyproject.toml services/engine/requirements-cpu.txt Makefile
	@if [ -z '$(PYTHON)' ]; then echo 'Headrace needs Python >= 3.11, and none is on the path; install one, or give it: make PYTHON=/path/to/python3' >&2; exit 1; fi
	@if ! $(PYTHON) $(IS_PYTHON); then echo 'Headrace needs Python >= 3.11, got $(PYTHON); give another: make PYTHON=/path/to/python3' >&2; exit 1; fi
	@mkdir -p $(VENV)
	$(call step,1/4 virtual environment,[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV))
	@echo '$(TORCH)' > $(CONSTRAINTS)
	$(call step,2/4 PyTorch,$(PIP) $(TORCH))
	$(call step,3/4 SGLang,$(PIP) --no-deps $(BARE))
	$(call step,4/4 Headrace and what it and SGLang need,$(PIP) -c $(CONSTRAINTS) -r services/engine/requirements-cpu.txt -e '.[$(EXTRAS)]')
	@touch $(STAMP)

demo: install ## train the demo agent and show that it learns (about 3 minutes on 2 cores)
	@$(BIN)/headrace demo

test: install ## unit, integration and end-to-end tests
	@$(BIN)/python -m pytest

test-compose: install ## build the images and run the composed stack in a Docker engine (starts one if there is none)
	@$(BIN)/python -m pytest tests/compose -m compose

lint: install ## style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

audit: install ## known vulnerabilities of what the images have, where their database can be reached
	@.ci/audit

format: install ## rewrite the code in its format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: install ## choose the images' packages anew: what the tests run with in .venv
	@$(PIP) uv
	@$(BIN)/pip freeze --exclude-editable | grep == | grep -vE '^($(WITH_TORCH))' > $(VENV)/tested.txt
	@$(LOCK) --generate-hashes --extra hub > $(LOCKS)/inference-hub.txt
	@$(LOCK) --generate-hashes --extra agents --extra cli --no-emit-package huggingface-hub --no-emit-package hf-xet > $(LOCKS)/env-agents.txt
	@$(LOCK) --extra trainer --extra agents --extra examples --extra cli | grep -vE '^($(WITH_TORCH))' > $(LOCKS)/trainer.txt

chaos: install ## kill and stop the processes of a real run for 5 minutes, and account for every trajectory (about 9 minutes)
	@$(BIN)/python -m benchmarks.chaos

soak: install ## the whole run under load for half an hour, and what grew (about 36 minutes)
	@$(BIN)/python -m benchmarks.soak

bench-hub: install ## the hub beside smg and sglang-router (about 10 minutes on an idle machine)
	@$(PIP) -c $(CONSTRAINTS) -e '.[routers]'
	@$(BIN)/python -m benchmarks.hub

bench-weights: install ## what a weight update costs on real engines (about 10 minutes)
	@$(BIN)/python -m benchmarks.weights

bench-async: install ## what asynchrony gains over synchronous training, under virtual time (about 8 minutes)
	@$(BIN)/python -m benchmarks.asynchrony

bench-trainer: install ## an update against a step of TRL's, and what a checkpoint costs (about 9 minutes)
	@$(BIN)/python -m benchmarks.trainer

bench-learning: install ## how well six policy losses learn from stale data (a quarter of an hour on 2 cores)
	@$(BIN)/python -m benchmarks.learning --output runs/learning

clean: ## remove .venv, caches and the demo's runs
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info runs/demo runs/demo-*
