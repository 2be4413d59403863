# Every target sets up what it needs: the environment in .venv is built once and rebuilt when pyproject.toml changes.
PYTHON ?= python3
# A GPU user names another build here, for example: make test TORCH="torch==2.13.0 --index-url <your index>"
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.built
RANKS ?= 2
DEMO_ARGS ?=

export OMP_NUM_THREADS ?= 1

.PHONY: help venv test lint demo bench bench-planner bench-exchange bench-overhead bench-packing bench-positions bench-encode bench-index bench-trainer bench-megatron clean

help:
	@echo "make demo | test | lint | bench | bench-{planner,exchange,overhead,packing,positions,encode,index,trainer,megatron} | venv | clean"

venv: $(STAMP)

$(STAMP): pyproject.toml
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(STAMP)

test: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright

demo: $(STAMP)
	$(BIN)/python examples/demo/run.py --ranks $(RANKS) $(DEMO_ARGS)

bench: bench-planner bench-exchange bench-overhead bench-packing bench-positions bench-encode bench-trainer bench-megatron

bench-planner bench-exchange bench-overhead bench-packing bench-positions bench-encode bench-index bench-trainer bench-megatron: bench-%: $(STAMP)
	$(BIN)/python -m benchmarks.$* $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .venv-megatron build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
