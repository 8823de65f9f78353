# Two commands matter: `make serve` (fresh machine -> a running 1P1D of a real small model) and `make test`.
# Everything is installed into .venv; nothing outside this folder and the user's cache is touched.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PORT   ?= 8000

.PHONY: help serve test test-fast coverage check format setup setup-dev reference clean

help:            ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

serve: setup     ## set up everything, then run 1 prefill + 1 decode engine on this CPU
	$(BIN)/disagg serve --config examples/1p1d-cpu.yaml --port $(PORT)

test: setup-dev check  ## set up everything, then static checks and the whole test suite, real engines included
	$(BIN)/python -m pytest

test-fast: setup-dev   ## the tests that need no real engine
	$(BIN)/python -m pytest -m "not real_engine"

coverage: setup-dev    ## branch coverage of the tests that need no real engine
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not real_engine"
	$(BIN)/coverage combine
	$(BIN)/coverage report

check: setup-dev       ## formatting, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup-dev      ## apply formatting and safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reference: setup-dev   ## regenerate the generated pages and schemas
	$(BIN)/python -m disagg.topology.reference
	$(BIN)/python -m disagg.router.reference
	$(BIN)/python -m disagg.catalog.reference

setup: $(VENV)/.engine-ready      ## environment with the CPU engine and the small model

setup-dev: $(VENV)/.dev-ready     ## the same, with what the tests need

$(VENV)/.engine-ready: pyproject.toml scripts/setup requirements/constraints.txt
	PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup engine
	@touch $@

$(VENV)/.dev-ready: $(VENV)/.engine-ready
	PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup dev
	@touch $@

clean:           ## remove the environment and caches of this checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage* dist build
