# Two commands do all the set-up: `make demo` and `make test`. Both may be repeated; the second time they are quick.
# `.venv` holds what a user installs, `.venv-dev` the development tools beside it. A stamp in each remembers what
# it was made from, so pip runs only when that changed.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
CONSTRAINTS ?=# a file of pinned versions; CI sets it
ARGS ?=# more arguments for pytest: make test ARGS='-k cli -x'
MODEL := smollm2-135m

PIP_FLAGS := --quiet --disable-pip-version-check $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
BIN := .venv/bin
DEV := .venv-dev/bin

.PHONY: help demo test test-slow check format bench readme clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       install into .venv, fetch a small model, ask it a question"
	@echo "make test       install the development tools into .venv-dev, run the tests"
	@echo "make test-slow  the tests that take minutes"
	@echo "make check      lint, formatting, types"
	@echo "make format     let ruff rewrite what it can"
	@echo "make bench      the figures of this machine"
	@echo "make readme     measure again and rewrite the README's table"
	@echo "make clean      remove both environments and all caches in this folder (models stay)"

demo: .venv/.installed
	@$(BIN)/mainspring pull $(MODEL)
	@echo "> What is the capital of Germany?"
	@$(BIN)/mainspring chat --model $(MODEL) --temperature 0 --prompt "What is the capital of Germany?"
	@echo "> How fast is that here? (mainspring bench throughput)"
	@$(BIN)/mainspring bench throughput --model $(MODEL) --repeats 1

test: .venv-dev/.installed
	@$(DEV)/mainspring pull $(MODEL)
	$(DEV)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: .venv-dev/.installed
	@$(DEV)/mainspring pull $(MODEL)
	$(DEV)/python -m pytest -m slow $(ARGS)

check: .venv-dev/.installed
	$(DEV)/ruff check .
	$(DEV)/ruff format --check .
	$(DEV)/mypy

format: .venv-dev/.installed
	$(DEV)/ruff check --fix .
	$(DEV)/ruff format .

bench: .venv/.installed
	$(BIN)/mainspring bench scheduler
	$(BIN)/mainspring bench throughput

readme: .venv/.installed
	$(BIN)/python benchmarks/readme_table.py

clean:
	rm -rf .venv .venv-dev .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

NATIVE := $(shell find native -name '*.cpp' -o -name '*.h' -o -name '*.toml' -o -name 'CMakeLists.txt' -o -name '*.py')

.venv/.installed: pyproject.toml $(NATIVE)
	@$(MAKE) --no-print-directory environment TARGET=. VENV=.venv
	@touch $@

.venv-dev/.installed: pyproject.toml $(NATIVE) $(CONSTRAINTS)
	@$(MAKE) --no-print-directory environment TARGET='.[dev]' VENV=.venv-dev
	@touch $@

.PHONY: environment
environment:
	@test -n "$(PYTHON)" || { echo "mainspring needs Python 3.11 or newer: make PYTHON=/path/to/python3.12 ..." >&2; exit 2; }
	@echo "Setting up $(VENV) with $(PYTHON) (once)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) --editable '$(TARGET)'
	@echo "Building the native kernels (once; about two minutes)"
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) ./native || echo \
		"The native kernels could not be built: numpy's are used, which are slower. They need a C++20 compiler (g++ 11, clang 14)." >&2
