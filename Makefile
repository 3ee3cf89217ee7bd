# Each environment is made once, and again when pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# Tests start interpreters by the hundred: without compiled files each would compile the library anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
SEEDS ?= 10000
JOBS ?= 2

.PHONY: help env demo test faults soak explore simulate gallery pictures check format bench bench-docs docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(VENV)/.dev ## Make .venv with everything that development needs

demo: $(VENV)/.base ## Show the lock at work; needs no server
	$(BIN)/lockfast demo

# Two rounds, so that tests that count milliseconds do not share the cores with those that count states. A file stays
# with one worker, so that its servers are started once; the longest are first (see tests/conftest.py). There are more
# workers than cores, as a test waits for most of its time.
TIMED = $(shell grep -rl --include='*.py' '^pytestmark = pytest.mark.timing' tests)
SPREAD := --dist loadfile --no-loadscope-reorder
test: $(VENV)/.dev ## Run the tests
	$(BIN)/python -m pytest -n 5 $(SPREAD) -m "timing and not faults and not soak" $(TIMED)
	$(BIN)/python -m pytest -n 4 $(SPREAD) -m "not timing and not faults and not soak"

faults: $(VENV)/.dev ## Run the long tests of real faults: failovers, migrations, nodes down
	$(BIN)/python -m pytest -n 2 --dist loadfile -m faults

soak: $(VENV)/.dev ## Run what takes ten thousand rounds: releases that race renewals, memory
	$(BIN)/python -m pytest -m soak

explore: $(VENV)/.dev ## Search every interleaving of the models, and write the gallery of broken locks
	$(BIN)/python -m verify.explore --jobs $(JOBS)
	LOCKFAST_SWITCHES=2 $(BIN)/python -m pytest -q --timeout 1800 -n $(JOBS) tests/shells
	$(BIN)/python -m verify.gallery

simulate: $(VENV)/.dev ## Simulate many clients under faults: make simulate SEEDS=10000
	$(BIN)/python -m verify.simulate --seeds $(SEEDS) --jobs $(JOBS)

gallery: $(VENV)/.dev ## Write docs/gallery.md anew
	$(BIN)/python -m verify.gallery

pictures: $(VENV)/.dev ## Draw the pictures of the command in docs/images anew, from real runs
	$(BIN)/python -m tools.pictures

check: $(VENV)/.dev ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev ## Format the code and repair what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench ## Measure against other lock libraries, and write the pages; QUICK=1 for a short run
	$(BIN)/python -m bench --json bench/results.json $(if $(QUICK),--quick)
	$(BIN)/python -m bench.pages

bench-docs: $(VENV)/.bench ## Write docs/benchmarks.md and the README's table from the last results
	$(BIN)/python -m bench.pages

docs: $(VENV)/.docs ## Build the documentation into site/
	$(BIN)/mkdocs build --strict --quiet

clean: ## Remove what was built, .venv included
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml | $(BIN)/python
	$(PIP) install --editable .
	@touch $@

$(VENV)/.dev $(VENV)/.bench $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[$*]'
	@touch $(VENV)/.base $@
