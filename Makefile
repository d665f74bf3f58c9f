# Every target sets up what it needs: Python >= 3.11 and make are enough.
#
#   PYTHON=python3.13   makes the environment; an existing environment keeps its Python
#   VENV=.venv          where the environment lives
#   PINS="-r tests/colab.txt"    further arguments of pip, here the lowest releases
#   ARGS="..."          passed to the command
#   NAME=gensim         which race; without, `make race` lists them
#   SECONDS=60          how long each kind of `make soak` runs

PYTHON ?= python3
VENV ?= .venv
PINS ?=
JOBS ?= 2
ARGS ?=
NAME ?=
SECONDS ?= 60

# If set, every process recompiles 2,000 modules (6 s).
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# .ci/run sets another one.
INSTALL_WITH ?= $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile
# A file's tests run in one process: they share what they compile.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Stops with a sentence if $(1) is not a Python of 3.11 or newer.
check_python = $(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	|| { echo "sparsejax needs Python 3.11 or newer; '$(1)' is" \
	"'`$(1) --version 2>&1 | tail -n 1`'." \
	"Name another one: make PYTHON=python3.13" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-window test-colab soak lint types docs notebooks bench race dist clean
.DELETE_ON_ERROR:

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed-demo  ## train word vectors on real text, and time a step
	@$(BIN)/python examples/word2vec.py $(ARGS)

test: $(VENV)/.installed-tests  ## the fast tests, which a contributor needs
	@$(PYTEST) --quick $(ARGS)

test-all: $(VENV)/.installed-tests $(VENV)/.installed-tests-all  ## every test: pages, notebooks, recorded answers too
	@$(PYTEST) $(ARGS)

test-window: $(VENV)/.installed-tests  ## what depends on the release of JAX
	@$(PYTEST) --quick -m window $(ARGS)

test-colab: $(VENV)/.installed-tests  ## a notebook in an environment like Colab's
	@TEST_COLAB=1 $(PYTEST) tests/house/test_install.py $(ARGS)

soak: $(VENV)/.installed-tests $(VENV)/.installed-tests-all  ## fuzzers, damaged files, kills: ARGS="--seed 7"
	@for kind in programs models chains trees changes index damage kills; do \
		echo "=== $$kind"; \
		$(BIN)/python -m tests.tools.fuzz $$kind --seconds $(SECONDS) $(ARGS) || exit 1; \
	done

lint: $(VENV)/.installed-tests $(VENV)/.installed-dev  ## ruff, import-linter
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports --no-cache

types: $(VENV)/.installed-tests $(VENV)/.installed-dev  ## pyright
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pyright --pythonpath $(BIN)/python $(ARGS)
	@$(BIN)/python tests/tools/known_types.py

docs: $(VENV)/.installed-docs  ## the site, in build/site; a warning is an error
	@$(BIN)/sphinx-build -q -W --keep-going -c docs . build/site $(ARGS)

notebooks: $(VENV)/.installed-notebooks  ## run the notebooks, keep what they show
	@$(BIN)/python notebooks/execute.py $(ARGS)

bench: $(VENV)/.installed-bench  ## python -m benchmarks
	@$(BIN)/python -m benchmarks $(ARGS)

race: $(VENV)/.installed-bench $(VENV)/.installed-data  ## an example against a program people use: NAME=gensim
	@$(BIN)/python -m benchmarks races $(NAME) $(ARGS)

dist: $(VENV)/.installed-dist  ## build a wheel and an sdist, and try them in a fresh environment
	@$(BIN)/python tests/tools/dist.py $(ARGS)

clean:  ## remove environments, caches and builds
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .hypothesis .jax_cache
	find sparsejax tests benchmarks -name __pycache__ -prune -exec rm -rf {} + \
		2>/dev/null || true

$(VENV)/.made:
	@$(call check_python,$(PYTHON))
	@echo "Making $(VENV) with `$(PYTHON) --version 2>&1`"
	@$(PYTHON) -m venv $(VENV)
	@$(call check_python,$(BIN)/python)
	@touch $@

$(VENV)/.installed-%: pyproject.toml tests/colab.txt tests/between.txt | $(VENV)/.made
	@echo "Installing sparsejax[$*] into $(VENV)"
	@$(INSTALL_WITH) -e '.[$*]' $(PINS)
	@touch $@
