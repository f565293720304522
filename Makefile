# Needs Python 3.11 or newer with pip, a C compiler and make. Everything goes into .venv; nothing outside this folder is changed.

PY ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.DEFAULT_GOAL := help
.PHONY: help install demo check test test-slow test-slurm clean

help:  ## this list
	@echo "make TARGET [PY=python3.11] [ARGS='words for the command']"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

install: $(STAMP)  ## the virtual environment .venv with llmtrain, pinned dependencies and the gates

demo: $(STAMP)  ## train a small model on this machine's own text, about two minutes; ARGS: overrides
	@echo "llmtrain is $(BIN)/llmtrain; source $(BIN)/activate puts it on the path"
	$(BIN)/llmtrain +experiment=demo $(ARGS)

check: $(STAMP)  ## lint, format, types, import layers, size limits
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_limits.py

test: $(STAMP)  ## all tests but the slow ones and those that need a GPU or Slurm; ARGS: words for pytest
	$(BIN)/python -m pytest -m "not slow and not gpu and not slurm" $(ARGS)

test-slow: $(STAMP)  ## the slow tests only
	$(BIN)/python -m pytest -m "slow and not gpu and not slurm" $(ARGS)

test-slurm: $(STAMP)  ## the tests on a Slurm that they start; needs root and slurm-wlm (slurmctld, slurmd, srun)
	$(BIN)/python -m pytest -m slurm $(ARGS)

clean:  ## remove .venv, caches and build products; runs/ stays
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find llmtrain scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PY) -c 'import sys; sys.exit("llmtrain needs Python 3.11 or newer; choose one with PY=..." if sys.version_info < (3, 11) else 0)'
	$(PY) -m venv $(VENV)

# -e: the checkout is what runs, so the stamp only depends on what decides about packages and scripts.
$(STAMP): $(BIN)/python setup.cfg pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[tokenizers,data,wandb,tensorboard,test,dev]'
	@touch $@
