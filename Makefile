# make demo   train a small CNN plain and compressed, side by side (about 2 minutes after the installation)
# make test   everything that CI checks: format, lint, types, tests
# make fast   the quick tests alone;  make lint   format, lint and types alone
# Each makes .venv itself. constraints-dev.txt keeps torch at the version that the project is developed with.

SHELL := /bin/bash
BASE_PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTHON := .venv/bin/python
INSTALL := $(PYTHON) -m pip install -qq --disable-pip-version-check -c constraints-dev.txt
# Triton's interpreter runs the GPU kernels on a CPU in the tests. CUDA builds of torch bring their own triton.
TRITON := triton==3.6.0

.PHONY: demo test fast lint clean

demo: .venv/installed
	$(PYTHON) -m halley demo

test: .venv/installed-dev lint
	$(PYTHON) -m pytest

fast: .venv/installed-dev
	$(PYTHON) -m pytest -m "not slow"

lint: .venv/installed-dev
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(PYTHON):
	@"$(BASE_PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Halley needs Python 3.11 or newer; name one with: make BASE_PYTHON=/path/to/python3 ..." >&2; exit 2; }
	@"$(BASE_PYTHON)" -m venv .venv

.venv/installed: $(PYTHON) pyproject.toml constraints-dev.txt
	@echo "Installing halley with torch, numba, matplotlib and their dependencies into .venv (1 to 5 minutes, once)"
	@$(INSTALL) -e '.[cpu,cli]'
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "Installing the development packages: peers of the benchmark, pytest, ruff, mypy (about a minute, once)"
	@$(INSTALL) -e '.[cpu,train,bench,dev]'
	@$(PYTHON) -c 'import triton' 2>/dev/null || $(INSTALL) '$(TRITON)'
	@touch $@
