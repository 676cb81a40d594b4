# tinyedge: `make demo` and `make test` work from a clean clone; the other targets are for developers.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
WORKERS ?= 2

# System packages. One for tests is installed when the command behind its colon is missing.
VENV_PACKAGES := python3 python3-venv
TEST_PACKAGES := qemu-user:qemu-aarch64 chromium:chromium nodejs:node npm:npm gcc:gcc clang:clang \
  mesa-vulkan-drivers:/usr/share/vulkan/icd.d/lvp_icd.x86_64.json
NPM := tests/web/node_modules/.installed

.PHONY: demo test lint types unit bench bench-web fuzz soak wheel clean system

demo: $(VENV)/.installed
	$(BIN)/python -m examples.demo

test: lint types unit

lint: $(VENV)/.installed
	$(BIN)/ruff check

types: $(VENV)/.installed
	rm -rf build/types
	mkdir -p build/types/tinyedge
	ln -s $(CURDIR)/tinyedge/* $(CURDIR)/codegen $(CURDIR)/drivers $(CURDIR)/web build/types/tinyedge/
	$(BIN)/mypy build/types/tinyedge examples tests $(wildcard bench)

unit: $(VENV)/.installed system
	@$(MAKE) --no-print-directory $(NPM)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

bench: $(VENV)/.installed
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev,bench]'
	$(BIN)/python -m bench

bench-web: $(VENV)/.installed system $(NPM)
	npm install --prefix bench/browser --no-audit --no-fund --no-package-lock --silent
	$(BIN)/python -m bench.web

fuzz soak: $(VENV)/.installed
	$(BIN)/python -m bench.$@

# Without its last build: setuptools would pack modules that have since been deleted.
wheel: $(VENV)/.installed
	rm -rf build/lib
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Tests that need a command that isn't there are skipped by name, so this only says so.
system:
	@for entry in $(TEST_PACKAGES); do \
	  package=$${entry%%:*}; { command -v $${entry##*:} >/dev/null || [ -e $${entry##*:} ]; } && continue; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $$package >/dev/null; \
	  else echo "tinyedge: $$package is missing, its tests are skipped; install it (apt-get install $$package)"; fi \
	done

# What bundles are tested with; without npm their tests are skipped by name.
$(NPM): tests/web/package.json
	@if command -v npm >/dev/null; then \
	  npm install --prefix tests/web --no-audit --no-fund --no-package-lock --silent && touch $@; \
	else echo "tinyedge: npm is missing, the tests of bundles in a browser are skipped; install it"; fi

# A virtual environment that was begun is finished; one whose needs have changed is brought up to them.
$(VENV)/.installed: pyproject.toml
	@[ -x $(BIN)/python ] || $(PYTHON) -c 'import ensurepip' 2>/dev/null \
	  || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(VENV_PACKAGES) >/dev/null; \
	  else echo "tinyedge: a virtual environment needs $(VENV_PACKAGES); install them and run make again"; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "tinyedge: $(PYTHON) is missing or older than 3.11; name another with make PYTHON=..."; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@
