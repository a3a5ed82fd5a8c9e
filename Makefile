# Verbs: run, test, setup, lint, bench; sweep: many generated cases on the unmodified release; quality: how small found cases get;
# shadow: each kernel launch in Triton's interpreter as well. All paths are relative: the checkout may lie anywhere.
# An environment keeps its Python: venv does not replace what is there, and another's library beside it cannot even load ssl.
PYTHON ?= $(or $(shell $(BIN)/python -c 'import ssl, sys; sys.version_info < (3, 11) or print("$(BIN)/python")' 2>/dev/null), \
  $(shell for python in python3.11 /usr/bin/python3.11 python3 /usr/bin/python3; do \
  $$python requirements/fastest.py 2>/dev/null; done | sort -n -k1,1 -k2,2 | head -1 | cut -d" " -f3-),python3)
# On Linux the common package index serves torch with CUDA libraries (gigabytes). Any build of this version will do.
TORCH ?= torch==2.13.0
KERNELS ?= fast
CASES ?= 1000
SEED ?= 0
BIN := .venv/bin
# Not compiled: of 20,000 modules few are ever imported, and those are compiled then.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
READY := .venv/.ready
KEPT = "$(PYTHON)" -c 'import os, sys; sys.exit(not os.path.samefile(sys._base_executable, "$(BIN)/python"))' 2>/dev/null

.PHONY: run test setup lint sweep quality shadow bench clean

run: setup
	$(BIN)/eagletwin prove 25015 26329 row-overflow multi-layer-chunk-tail-3
	@echo "more: . .venv/bin/activate, then eagletwin --help"

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal

sweep: setup
	$(BIN)/eagletwin fuzz --cases $(CASES) --minutes 600 --kernels $(KERNELS) --seed $(SEED)

quality: setup
	$(BIN)/python -m pytest tests/quality -q

shadow: setup
	$(BIN)/eagletwin prove all --kernels shadow
	$(BIN)/eagletwin fuzz --cases 100 --minutes 600 --kernels shadow

bench: setup
	$(BIN)/eagletwin bench all --write docs

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(READY)

$(READY): requirements/engine.lock requirements/dev.lock pyproject.toml
	$(eval PYTHON := $$(PYTHON))
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is not there, or older than Python 3.11"; echo "  so:  nothing was installed"; \
	    echo "  try: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 129; }
	@echo "setting up .venv (about 3 GB on disk; a few minutes, once)"
	"$(PYTHON)" -m venv $$($(KEPT) || echo --clear) .venv
	$(PIP) "$(TORCH)"
	$(PIP) --no-deps -r requirements/engine.lock -r requirements/dev.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $(READY)

clean:
	rm -rf .venv build dist eagletwin-runs
