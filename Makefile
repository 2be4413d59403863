# Every target sets up what it needs: the environment in .venv is built once and rebuilt when pyproject.toml changes.
PYTHON ?= python3
# A GPU user names another build here, for example: make test TORCH="torch==2.13.0 --index-url <your index>"
TORCH ?= torch==2.13.0

# The second Megatron-Core lane: Python 3.12 with megatron-core 0.19. Transformer Engine must not be there: without a GPU
# its wheel breaks `import megatron.core`.
MEGATRON_PYTHON ?= $(shell for python in python3.12 $$(ls -d ~/.pyenv/versions/3.12*/bin/python 2>/dev/null | sort -rV); do \
	$$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo $$python && break; done)
TORCH_MEGATRON ?= torch
MEGATRON_CORE := megatron-core>=0.19,<0.20
MEGATRON_TESTS := tests/megatron tests/collate/test_megatron.py tests/collate/test_gpt.py tests/scheduler/test_groups.py \
	tests/models/test_prepare.py::test_unwrap_megatron

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.built
MEGATRON_VENV := .venv-megatron
MEGATRON_STAMP := $(MEGATRON_VENV)/.built
RANKS ?= 2
DEMO_ARGS ?=

export OMP_NUM_THREADS ?= 1

.PHONY: help venv venv-megatron docs dist compatibility test check-page test-megatron test-megatron-lane lint demo bench bench-planner bench-exchange bench-overhead bench-packing bench-positions bench-encode bench-index bench-trainer bench-megatron bench-record bench-end-to-end bench-simulate bench-peers bench-pods clean

help:
	@echo "make demo | test | test-megatron | check-page | lint | docs | dist | compatibility | bench | bench-{planner,exchange,overhead,packing,positions,encode,index,trainer,megatron,record,end-to-end,simulate,peers,pods} | venv | clean"

venv: $(STAMP)

$(STAMP): pyproject.toml
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(STAMP)

# Opens the HTML pages in headless Chromium: apt-get install chromium. The driver is installed here, it brings no browser.
check-page: $(STAMP)
	@command -v $${CHROMIUM:-chromium} >/dev/null || { \
		echo "check-page needs a browser: apt-get install chromium, or set CHROMIUM to the path of one"; exit 1; }
	$(BIN)/pip install --quiet "playwright>=1.50"
	$(BIN)/python tests/cli/check_page.py runs/page

test: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal $(PYTEST_ARGS)

venv-megatron:
	@if [ -n "$(MEGATRON_PYTHON)" ]; then $(MAKE) --no-print-directory $(MEGATRON_STAMP); fi

test-megatron:
	@if [ -z "$(MEGATRON_PYTHON)" ]; then \
		echo "test-megatron: no Python 3.12 found, so nothing ran with $(MEGATRON_CORE); name one with MEGATRON_PYTHON=..."; \
	else $(MAKE) --no-print-directory test-megatron-lane; fi

# Not rebuilt but brought up to date when pyproject.toml changes: it holds gigabytes.
$(MEGATRON_STAMP): pyproject.toml
	test -d $(MEGATRON_VENV) || $(MEGATRON_PYTHON) -m venv $(MEGATRON_VENV)
	$(MEGATRON_VENV)/bin/pip install --quiet --no-compile "$(TORCH_MEGATRON)"
	$(MEGATRON_VENV)/bin/pip install --quiet --no-compile --editable ".[hf,test]" "$(MEGATRON_CORE)"
	touch $(MEGATRON_STAMP)

test-megatron-lane: $(MEGATRON_STAMP)
	@$(MEGATRON_VENV)/bin/python -W ignore -c \
		"import platform, megatron.core; print('megatron-core', megatron.core.__version__, 'on Python', platform.python_version())"
	$(MEGATRON_VENV)/bin/pytest -W ignore::DeprecationWarning -n 2 --dist worksteal $(PYTEST_ARGS) $(MEGATRON_TESTS)

# The site, in site/: no network, neither here nor in the reader's browser. Drawings are drawn anew from plans of this version.
docs: $(STAMP)
	$(BIN)/python docs/drawings/draw.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

# Wheel and sdist in dist/, each installed and tried in an environment of its own.
dist: $(STAMP)
	$(BIN)/python tests/package/check_dist.py

# Adds what is installed here to the table of versions that were tested.
compatibility: $(STAMP)
	$(BIN)/python -m tests.compatibility

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright

demo: $(STAMP)
	$(BIN)/python examples/demo/run.py --ranks $(RANKS) $(DEMO_ARGS)

bench: bench-planner bench-exchange bench-overhead bench-packing bench-positions bench-encode bench-trainer bench-megatron bench-record bench-end-to-end bench-simulate bench-peers bench-pods

bench-planner bench-exchange bench-overhead bench-packing bench-positions bench-encode bench-index bench-trainer bench-megatron bench-record bench-end-to-end bench-simulate bench-peers bench-pods: bench-%: $(STAMP)
	$(BIN)/python -m benchmarks.$(subst -,_,$*) $(BENCH_ARGS)

clean:
	rm -rf $(VENV) $(MEGATRON_VENV) .venv-peers build dist site runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
