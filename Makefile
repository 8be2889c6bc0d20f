# Every command a developer needs; `make` alone lists them.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# PYTHON=... chooses the interpreter that .venv is made with (after `make clean`).
CANDIDATES := $(or $(PYTHON),python3 python3.12 python3.11)

# `make quickstart data.text=my_texts/ train.steps=100`: what has a dot in its name is a setting.
SETTINGS := $(foreach word,$(MAKEOVERRIDES),$(if $(findstring .,$(firstword $(subst =, ,$(word)))),$(word)))

# Ranks share the cores, so each one computes on one thread.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-fast test-exhaustive lint fmt docs docs-serve bench bench-gpu bench-kernels bench-docs clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install megabit with the releases of constraints.txt

quickstart: setup ## train a small ternary model on Shakespeare with TP=2 x PP=2, evaluate, sample, plot
	@examples/quickstart.sh $(SETTINGS)

# Tests run side by side, a file in one process, in the order of tests/conftest.py.
PYTEST := -m pytest -q --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test: setup ## run the tests; CI runs these
	@$(PY) $(PYTEST) -m "not exhaustive"

test-fast: setup ## run the tests that take seconds
	@$(PY) $(PYTEST) -m "not slow and not exhaustive"

test-exhaustive: setup ## run the combinations that `make test` leaves out
	@$(PY) $(PYTEST) -m exhaustive

lint: setup ## check style and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

fmt: setup ## format the sources and fix what ruff can fix
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

# Its maker's advertisement is not a warning of ours.
docs docs-serve: export NO_MKDOCS_2_WARNING := 1

docs: setup ## build the manual as a site that works without a network
	@$(PY) -m mkdocs build --quiet
	@echo "The manual: site/index.html (its search needs a server: make docs-serve)"

docs-serve: setup ## show the manual on this host, and again after each change
	@$(PY) -m mkdocs serve

bench: setup ## measure everything on this CPU beside its baselines (12 minutes): runs/bench/benchmarks.md
	@$(PY) -m megabit bench all

bench-gpu: setup ## measure one CUDA device beside bf16 PyTorch (8 minutes): runs/bench-gpu/benchmarks.md
	@$(PY) -m megabit bench gpu

bench-kernels: setup ## measure the kernels against the machine's limits (about 75 minutes)
	@$(PY) -m megabit bench kernels

bench-docs: setup ## write docs/benchmarks.md from the results in docs/results/benchmarks/
	@$(PY) -m megabit bench render docs/results/benchmarks/*.json --out docs/benchmarks.md

clean: ## remove .venv, build products and caches (data/ and runs/ stay)
	rm -rf $(VENV) build dist site *.egg-info kernels/build kernels/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find megabit kernels tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
	find megabit kernels -name '*.so' -type f -delete

# Made anew when a requirement or a C source changes; an environment that was not finished is begun
# again.
$(STAMP): setup.py constraints.txt kernels/native_build.py $(wildcard kernels/csrc/*.[ch])
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  for python in $(CANDIDATES) ''; do \
	    if [ -z "$$python" ]; then \
	      echo "error: megabit needs Python 3.11 or newer (tried: $(CANDIDATES)); name one: make setup PYTHON=/path/to/python" >&2; \
	      exit 1; \
	    fi; \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
	  done; \
	  if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "error: $$python cannot create virtual environments; install its venv module (Debian, Ubuntu: the package python3-venv)" >&2; \
	    exit 1; \
	  fi; \
	  echo "Creating $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv --clear $(VENV); \
	fi
	@echo "Installing megabit and what it needs into $(VENV) (a minute or two, besides the download)"
	@$(PY) -m pip install -qq --disable-pip-version-check --prefer-binary -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "Ready: $$($(PY) -c 'import megabit, torch; print("megabit", megabit.__version__, "with torch", torch.__version__)')"
	@$(PY) -W ignore -c 'from megabit_kernels.native import isas; print("Native CPU kernels:", ", ".join(isas()) or "none, so products run through torch, several times slower. Install gcc or clang, then: touch setup.py; make setup")'
