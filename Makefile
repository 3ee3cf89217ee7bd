# Each environment is made once, and again when pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help env demo test faults check format bench docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(VENV)/.dev ## Make .venv with everything that development needs

demo: $(VENV)/.base ## Show the lock at work; needs no server
	$(BIN)/holdfast demo

test: $(VENV)/.dev ## Run the tests
	$(BIN)/python -m pytest

faults: $(VENV)/.dev ## Run the long tests of real faults: failovers, migrations, nodes down
	$(BIN)/python -m pytest -m faults

check: $(VENV)/.dev ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev ## Format the code and repair what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench ## Measure against other lock libraries
	$(BIN)/python -m bench

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
