# make demo     train plain and compressed, side by side           2 to 4 minutes
# make fast     the tests that are neither slow nor soak           wanted in 2 minutes on two idle cores, takes 1.6
# make test     lint, then every test that is not soak             wanted in 7 minutes, takes 7.5 to 10 after a fresh clone
# make soak     random and long tests, ended after 25 minutes      at most 30 minutes
# make lint     format, style, types, spelling, Markdown           1 minute
# make docs     the documentation site, into site/                 half a minute
# make browser  install a browser for the one test that uses it    needs root and apt-get
#
# Each makes its own environment in .venv. No target but `browser` installs a system package.
# constraints-dev.txt keeps torch at the version that the project is developed with.

SHELL := /bin/bash
BASE_PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTHON := .venv/bin/python
INSTALL := $(PYTHON) -m pip install -qq --disable-pip-version-check -c constraints-dev.txt
# Triton's interpreter runs the GPU kernels on a CPU in the tests. CUDA builds of torch bring their own triton.
TRITON := triton==3.6.0

# Two processes. One that is done takes tests from the other, so that no list of long tests has to be kept.
PYTEST := $(PYTHON) -m pytest -n 2 --dist worksteal
export OMP_WAIT_POLICY := passive
# Each of the two processes has a core: with a thread for every core they would wait for each other.
test fast soak: export OMP_NUM_THREADS := 1
MARKDOWN := *.md docs benchmarks/README.md examples/README.md

.PHONY: demo test fast soak lint types words docs browser clean

demo: .venv/installed
	$(PYTHON) -m encke demo

test: lint
	$(PYTEST)

fast: .venv/installed-dev
	$(PYTEST) -m "not slow"

# After 25 minutes no test is started any more, and none may take longer than four. `timeout` is for one that hangs.
soak: .venv/installed-dev
	timeout --kill-after=30 1770 $(PYTEST) --soak --minutes 25

# Types take as long as everything else together.
lint: .venv/installed-dev
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	@$(MAKE) --no-print-directory --jobs=2 --output-sync types words

types:
	$(PYTHON) -m mypy

words:
	$(PYTHON) -m codespell_lib encke tests benchmarks examples docs/hooks.py mkdocs.yml Makefile pyproject.toml $(MARKDOWN)
	$(PYTHON) -m pymarkdown scan $(MARKDOWN)

# A warning is an error (not with --quiet, which hides warnings from --strict). A test of `make test` does the same.
docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv/installed-dev
	$(PYTHON) -m mkdocs build --strict

browser:
	@command -v chromium chromium-browser google-chrome || \
		(apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium)

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(PYTHON):
	@"$(BASE_PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Encke needs Python 3.11 or newer; name one with: make BASE_PYTHON=/path/to/python3 ..." >&2; exit 2; }
	@"$(BASE_PYTHON)" -m venv .venv

.venv/installed: $(PYTHON) pyproject.toml constraints-dev.txt
	@echo "Installing encke with torch, torchvision, numba, matplotlib and their dependencies into .venv (1 to 5 minutes, once)"
	@$(INSTALL) -e '.[cpu,train]'
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "Installing the development packages: peers of the benchmark, trainers, pytest, ruff, mypy (2 to 3 minutes, once)"
	@$(INSTALL) -e '.[cpu,train,bench,integrations,docs,dev]'
	@$(PYTHON) -c 'import triton' 2>/dev/null || $(INSTALL) '$(TRITON)'
	@touch $@
