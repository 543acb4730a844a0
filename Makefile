# `make demo` and `make test` work from a bare clone: they need Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Tests run one process per core, so each process gets one thread. Those marked `threads` run again with two, which sleep
# while they wait: spinning would take the core from the thread they wait for.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PYTEST_THREADS := OMP_NUM_THREADS=2 GOMP_SPINCOUNT=10000 $(BIN)/python -m pytest -m 'threads and not slow'

.PHONY: demo test test-slow test-gpu test-real check format docs bench sync clean

demo: $(STAMP)
	$(BIN)/retrain demo

test: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -n auto --durations=30
	$(PYTEST_THREADS)

test-slow: $(DEV_STAMP)
	$(PYTEST) -n auto -m slow
	RETRAIN_FUZZ=full $(PYTEST) -n auto tests/config tests/advantages/test_pipeline.py tests/backends/test_prefix.py
	$(BIN)/mkdocs build --strict

test-gpu: $(DEV_STAMP)
	$(PYTEST) -m gpu

# Real servers and clusters, each in a virtual environment of its own below REAL. It installs gigabytes and takes long.
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

# Rewrites everything that is generated from the schema: retrain.toml, docs tables, manual blocks.
sync: $(DEV_STAMP)
	$(BIN)/python -m retrain.cli.sync

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache

# A stamp is younger than pyproject.toml and constraints.txt while nothing changed, so second runs install nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "retrain needs Python 3.11 or newer; try: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) -e .
	touch $@

$(DEV_STAMP): $(STAMP)
	$(PIP_INSTALL) -e ".[dev]"
	touch $@
