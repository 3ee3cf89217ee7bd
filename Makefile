# The environment is built once, and rebuilt when pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# The tests start hundreds of interpreters; without bytecode files each one would compile the library.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
SEEDS ?= 10000
JOBS ?= 2

.PHONY: help env demo test test-all coverage faults soak explore simulate gallery pictures check format bench \
	bench-docs docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(VENV)/.dev ## Create .venv with all development tools

demo: $(VENV)/.base ## Show locks at work; needs no server
	$(BIN)/lockfast demo

# Two rounds: tests that measure milliseconds do not share the cores with tests that need much CPU. There are more workers
# than cores because most tests wait most of the time.
TIMED = $(shell grep -rl --include='*.py' '^pytestmark = pytest.mark.timing' tests)
ROUND_1 = -m pytest -n 6 --dist worksteal $(TIMED)
ROUND_2 = -m pytest -n 6 --dist worksteal
LONG := faults or soak
test: $(VENV)/.dev ## Run the tests
	$(BIN)/python $(ROUND_1) -m "timing and not repeat and not ($(LONG))"
	$(BIN)/python $(ROUND_2) -m "not timing and not repeat and not ($(LONG))"

test-all: test ## Run the tests, and repeat their checks on every other server, topology and on uvloop
	$(BIN)/python $(ROUND_1) -m "timing and repeat and not ($(LONG))"
	$(BIN)/python $(ROUND_2) -m "not timing and repeat and not ($(LONG))"
	LOCKFAST_TEST_LOOP=uvloop $(BIN)/python $(ROUND_2) -k "asyncio or aio" -m "not timing and not repeat and not ($(LONG))"

# Coverage includes the processes that the tests start. A few tests of timing and of loaded modules fail under it; the
# report appears nevertheless.
coverage: $(VENV)/.dev ## Run the tests and report line and branch coverage
	$(BIN)/coverage erase
	-$(BIN)/coverage run $(ROUND_2) -m "not repeat and not ($(LONG))"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --sort=cover

faults: $(VENV)/.dev ## Run minutes of real faults: failovers, migrations, nodes down
	$(BIN)/python -m pytest -n 2 --dist loadfile -m faults

soak: $(VENV)/.dev ## Run ten thousand rounds of the races, and watch the memory
	$(BIN)/python -m pytest -m soak

explore: $(VENV)/.dev ## Search every interleaving of the models, and write the gallery of broken locks
	$(BIN)/python -m verify.explore --jobs $(JOBS)
	LOCKFAST_SWITCHES=2 $(BIN)/python -m pytest -q --timeout 1800 -n $(JOBS) tests/schedules
	$(BIN)/python -m verify.gallery

simulate: $(VENV)/.dev ## Simulate many clients under faults: make simulate SEEDS=10000
	$(BIN)/python -m verify.simulate --seeds $(SEEDS) --jobs $(JOBS)

gallery: $(VENV)/.dev ## Write docs/gallery.md
	$(BIN)/python -m verify.gallery

pictures: $(VENV)/.dev ## Draw the pictures in docs/images from real runs of the command
	$(BIN)/python -m tools.pictures

check: $(VENV)/.dev ## Check format, lint and types; pyright checks the typed program
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_typed_edges.py

format: $(VENV)/.dev ## Format the code and apply the fixes of the linter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench ## Measure against other lock libraries, and write the pages; QUICK=1 for a short run
	$(BIN)/python -m bench --json bench/results.json $(if $(QUICK),--quick)
	$(BIN)/python -m bench.pages

bench-docs: $(VENV)/.bench ## Write docs/benchmarks.md and the README's table from the last results
	$(BIN)/python -m bench.pages

docs: $(VENV)/.docs ## Build the documentation into site/
	$(BIN)/python -m mkdocs build --strict --quiet

clean: ## Remove all build results, .venv included
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml | $(BIN)/python
	$(PIP) install --editable .
	@touch $@

$(VENV)/.dev $(VENV)/.bench $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[$*]'
	@touch $(VENV)/.base $@
