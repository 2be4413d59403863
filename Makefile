# Every target sets up what it needs: the environment in .venv is built once and rebuilt when pyproject.toml changes.
PYTHON ?= python3
# A GPU user names another build here, for example: make test TORCH="torch==2.13.0 --index-url <your index>"
TORCH ?= torch==2.13.0
TORCHVISION ?= torchvision==0.28.0

# The second Megatron-Core lane: Python 3.12 with megatron-core 0.19. Transformer Engine must not be there: without a GPU
# its wheel breaks `import megatron.core`.
MEGATRON_PYTHON ?= $(shell for python in python3.12 $$(ls -d ~/.pyenv/versions/3.12*/bin/python 2>/dev/null | sort -rV); do \
	$$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo $$python && break; done)
TORCH_MEGATRON ?= torch
MEGATRON_CORE := megatron-core>=0.19,<0.20
MEGATRON_TESTS := tests/integrations/megatron tests/collate/packs/test_megatron.py tests/collate/packs/test_gpt.py \
	tests/scheduler/comm/test_groups.py tests/models/setup/test_prepare.py::test_unwrap_megatron

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.built
MEGATRON_VENV := .venv-megatron
VIDEO_VENV := .venv-videos
VIDEO_STAMP := $(VIDEO_VENV)/.built
MEGATRON_STAMP := $(MEGATRON_VENV)/.built
RANKS ?= 2
DEMO_ARGS ?=

BENCHMARKS := planner window groups exchange overhead packing positions families encode index trainer megatron record end-to-end simulate peers pods

export OMP_NUM_THREADS ?= 1

.PHONY: help venv venv-megatron docs dist compatibility test test-full test-videos check-page test-megatron test-megatron-lane lint demo bench clean $(BENCHMARKS:%=bench-%)

help:
	@echo "make demo           train a tiny Qwen2.5-VL on two ranks (RANKS=4, DEMO_ARGS=\"--steps 30\"), about a minute"
	@echo "make test           what every change must pass (PYTEST_ARGS=...), some minutes on two cores"
	@echo "make test-full      all tests, longer random runs, test-megatron and test-videos: what CI runs"
	@echo "make test-megatron  the Megatron-Core tests once more, with a later version; needs Python 3.12"
	@echo "make test-videos    video files through the real video processors, which need torchvision"
	@echo "make check-page     the HTML pages in a browser; needs chromium"
	@echo "make lint           ruff, mypy, pyright, import rules, unused names"
	@echo "make docs           the documentation as a site, in site/"
	@echo "make dist           wheel and sdist in dist/, each tried in an environment of its own"
	@echo "make compatibility  add what is installed here to the table of tested versions"
	@echo "make bench          all benchmarks (BENCH_ARGS=...); one of them is make bench-NAME, NAME one of"
	@echo "                    $(BENCHMARKS)"
	@echo "make venv           set up .venv, as every target above does; venv-megatron: that of test-megatron"
	@echo "make clean          remove all that was built"

venv: $(STAMP)

$(STAMP): pyproject.toml
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	@echo "installing torch (200 MB or more) ..."
	$(BIN)/pip install --quiet $(TORCH)
	@echo "installing evenpack and what its tests need (some minutes) ..."
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(STAMP)

# Opens the HTML pages in headless Chromium: apt-get install chromium. The driver is installed here, it brings no browser.
check-page: $(STAMP)
	@command -v $${CHROMIUM:-chromium} >/dev/null || { \
		echo "check-page needs a browser: apt-get install chromium, or set CHROMIUM to the path of one"; exit 1; }
	$(BIN)/pip install --quiet "playwright>=1.50"
	$(BIN)/python tests/cli/check_page.py runs/page

# Without the tests marked `full`: they repeat, for more settings, what another test shows.
test: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -m "not full" $(PYTEST_ARGS)

# Fetches the second Megatron-Core, gigabytes, while the tests run.
test-full: $(STAMP)
	@$(MAKE) --no-print-directory venv-megatron & second=$$!; \
	EVENPACK_HYPOTHESIS=full EVENPACK_SOAK_STEPS=200 $(BIN)/pytest -n 2 --dist worksteal $(PYTEST_ARGS); \
	status=$$?; wait $$second && exit $$status
	$(MAKE) --no-print-directory test-megatron
	$(MAKE) --no-print-directory test-videos

# The environment of the tests, and torchvision: it has no place there, because transformers takes other image processors with it.
$(VIDEO_STAMP): $(STAMP)
	rm -rf $(VIDEO_VENV)
	$(BIN)/python -m venv $(VIDEO_VENV)
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> $$($(VIDEO_VENV)/bin/python -c "import site; print(site.getsitepackages()[0])")/tests.pth
	$(VIDEO_VENV)/bin/pip install --quiet --no-deps "$(TORCHVISION)"
	touch $(VIDEO_STAMP)

test-videos: $(VIDEO_STAMP)
	$(VIDEO_VENV)/bin/python -m pytest -n 2 $(PYTEST_ARGS) tests/collate/encoding/test_video_processors.py

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
	$(BIN)/lint-imports --no-cache
	$(BIN)/vulture

demo: $(STAMP)
	$(BIN)/python examples/demo/run.py --ranks $(RANKS) $(DEMO_ARGS)

bench: bench-planner bench-window bench-groups bench-exchange bench-overhead bench-packing bench-positions bench-families bench-encode bench-trainer bench-megatron bench-record bench-end-to-end bench-simulate bench-peers bench-pods

$(BENCHMARKS:%=bench-%): bench-%: $(STAMP)
	$(BIN)/python -m benchmarks.$(subst -,_,$*) $(BENCH_ARGS)

clean:
	rm -rf $(VENV) $(MEGATRON_VENV) $(VIDEO_VENV) .venv-peers build dist site runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
