# One environment (.venv) for the demo, the tests and the checks; `make` alone says what there is.

PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= 2
CONFIG ?= lifecycle.toml
DATABASE ?=
BENCH ?= $(sort $(basename $(notdir $(wildcard tests/bench/bench_*.py))))

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet -c constraints.txt

export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench deploy-local deploy-down clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.installed ## train, break, validate, export and publish checkpoints in a local bucket
	$(BIN)/ckpt demo

test: $(VENV)/.installed ## the whole test suite (PYTEST_ARGS="-k name", WORKERS=2)
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: $(VENV)/.installed ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed ## put the code into the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed ## the benchmarks, one after the other (BENCH=bench_export)
	@for name in $(BENCH); do echo "== $$name"; OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.$$name || exit 1; done

deploy-local: $(VENV)/.installed ## a Prefect server, pools, workers and deployments on loopback (CONFIG=lifecycle.toml, DATABASE=postgresql+asyncpg://…)
	@DATABASE='$(DATABASE)' $(BIN)/python -m flows.deploying up --config $(CONFIG)

deploy-down: ## end all that deploy-local started
	@test ! -x $(BIN)/python || $(BIN)/python -m flows.deploying down

clean: ## remove the environment and everything that the tools left
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, so that no other package's wider range chooses another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, and '$(PYTHON)' is not: say which with make PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) (a few minutes)"; $(PYTHON) -m venv $(VENV); }
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) -e '.[dev,s3]'
	@touch $@
