# make demo   train plain and compressed, side by side (3 to 4 minutes after the installation)
# make test   everything that CI checks: format, lint, types, tests
# make fast   the quick tests alone;  make lint   format, lint and types alone
# Each makes .venv itself. constraints-dev.txt keeps torch at the version that the project is developed with.

SHELL := /bin/bash
BASE_PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTHON := .venv/bin/python
INSTALL := $(PYTHON) -m pip install -qq --disable-pip-version-check -c constraints-dev.txt
# Triton's interpreter runs the GPU kernels on a CPU in the tests. CUDA builds of torch bring their own triton.
TRITON := triton==3.6.0

# Two test files at a time; the tests of one file stay together, because they share what they have made.
TOGETHER := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test fast lint clean browser

demo: .venv/installed
	$(PYTHON) -m encke demo

test: .venv/installed-dev lint browser
	OMP_WAIT_POLICY=passive $(PYTHON) -m pytest $(TOGETHER)

fast: .venv/installed-dev
	OMP_WAIT_POLICY=passive $(PYTHON) -m pytest $(TOGETHER) -m "not slow"

lint: .venv/installed-dev
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

# One test looks at the report's page in a real browser, and is skipped where there is none.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { [ "$$(id -u)" != 0 ] || \
		(apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium) >/dev/null 2>&1 || true; }

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(PYTHON):
	@"$(BASE_PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Encke needs Python 3.11 or newer; name one with: make BASE_PYTHON=/path/to/python3 ..." >&2; exit 2; }
	@"$(BASE_PYTHON)" -m venv .venv

.venv/installed: $(PYTHON) pyproject.toml constraints-dev.txt
	@echo "Installing encke with torch, torchvision, numba, matplotlib and what they need into .venv (1 to 5 minutes, once)"
	@$(INSTALL) -e '.[cpu,train]'
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "Installing the development packages: peers of the benchmark, pytest, ruff, mypy (about a minute, once)"
	@$(INSTALL) -e '.[cpu,train,bench,dev]'
	@$(PYTHON) -c 'import triton' 2>/dev/null || $(INSTALL) '$(TRITON)'
	@touch $@
