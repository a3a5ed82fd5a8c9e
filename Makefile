# Verbs: run, quick, test, setup, lint, bench; python: the core on another Python; sweep: many generated cases on the unmodified
# release; quality: how small found cases get; findings: docs/findings' tests for SGLang, red on the release and green with
# their patches; upstream-test: the file for SGLang's own CI, in its own environment, green on the release and red without
# fixes; shadow: each kernel launch in Triton's interpreter as well; lock: requirements/*.lock anew. CONTRIBUTING.md says how
# long each takes. All paths are relative: the checkout may lie anywhere.
PYTHON ?= python3.11
# On Linux the common package index serves torch with CUDA libraries (gigabytes). Any build of this version will do.
TORCH ?= torch==2.13.0
KERNELS ?= fast
CASES ?= 1000
SEED ?= 0
# Folders of docs/findings that `make findings` tries; none: all. MINUTES: of each of three searches of what a patch breaks, and
# whether its cost is counted; 0: neither.
FINDINGS ?=
MINUTES ?= 0
# Further options for pytest, and the folders that `make quick` takes: those that need no SGLang. `make python` takes those that
# need no Triton either.
PYTEST ?=
CORE := tests/reference tests/families tests/deserved tests/harness tests/lab tests/page tests/triton_cpu
UV ?= uv
BIN := .venv/bin
# Not compiled: of 20,000 modules few are ever imported, and those are compiled then, once: container images tell Python not to
# keep bytecode, with which each of a thousand processes would compile torch anew (2 s).
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
PIP := $(BIN)/python $(PIP_INSTALL)
READY := .venv/.ready
# An environment that this Python made is kept; one of another is made anew: another's library beside it cannot even load ssl.
KEPT = "$(PYTHON)" -c 'import os, sys; sys.exit(not os.path.samefile(sys._base_executable, "$(BIN)/python"))' 2>/dev/null
# `make python` puts its environments here, one a Python.
OTHER = build/$(notdir $(PYTHON))

.PHONY: run quick test python setup lint sweep quality shadow bench lock findings upstream-test clean

run: setup
	$(BIN)/eagletwin prove 26329 25015 row-overflow multi-layer-chunk-tail-3
	@echo "more: . .venv/bin/activate, then eagletwin --help; docs/guide/first-case.md goes on from here"

quick: setup
	$(BIN)/python -m pytest -n auto --dist worksteal --quick $(PYTEST) $(CORE)

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST)

python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $(PYTHON) is not there, or older than Python 3.10"; echo "  so:  nothing was installed or tested"; \
	    echo "  try: make python PYTHON=/path/to/python3.12"; exit 129; }
	"$(PYTHON)" -m venv "$(OTHER)"
	"$(OTHER)/bin/python" $(PIP_INSTALL) "$(TORCH)"
	"$(OTHER)/bin/python" $(PIP_INSTALL) --no-deps --require-hashes -r requirements/core.lock
	"$(OTHER)/bin/python" $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	"$(OTHER)/bin/python" -m pytest -n auto --dist worksteal --quick $(PYTEST) $(filter-out tests/triton_cpu,$(CORE))

sweep: setup
	$(BIN)/eagletwin fuzz --cases $(CASES) --minutes 600 --kernels $(KERNELS) --seed $(SEED)

quality: setup
	$(BIN)/python -m pytest -n auto --dist worksteal --long $(PYTEST) tests

shadow: setup
	$(BIN)/eagletwin prove all --kernels shadow
	$(BIN)/eagletwin fuzz --cases 100 --minutes 600 --kernels shadow

findings: setup
	$(BIN)/python -m tests.findings.change --minutes $(MINUTES) $(FINDINGS)

# SGLang as its own CI has it: with all that it pins, CUDA libraries included (10 GB). No cache, no second environment.
THEIRS = build/upstream
upstream-test: setup
	"$(PYTHON)" -m venv "$(THEIRS)/env"
	"$(THEIRS)/env/bin/python" $(PIP_INSTALL) "$$(grep ^sglang== requirements/engine.in)"
	rm -rf "$(THEIRS)/source" "$(THEIRS)/wheel" && mkdir "$(THEIRS)/source"
	git ls-files -z --cached --others --exclude-standard | xargs -0 cp -P --parents -t "$(THEIRS)/source"
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$(THEIRS)/wheel" "$(THEIRS)/source"
	"$(THEIRS)/env/bin/python" $(PIP_INSTALL) --force-reinstall --no-deps "$(THEIRS)"/wheel/*.whl
	"$(THEIRS)/env/bin/python" $(PIP_INSTALL) "$(THEIRS)"/wheel/*.whl
	env -u PYTHONPATH "$(THEIRS)/env/bin/python" -m tests.upstream.attempt

bench: setup
	$(BIN)/python -m tests.lab speed --write build/records
	$(BIN)/python -m tests.lab search --write build/records

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Each list of pins, and the digests of the files that serve one of them: its source, and its wheels for these Pythons on Linux.
# uv may be any version. The bundle's machine has 3.12; the machine that packs it may have 3.11.
lock:
	mkdir -p build
	for list in engine:3.11:3.12:3.13 dev:3.11:3.12:3.13 gpu:3.11:3.12 gpu23:3.12:3.11 core:3.10:3.11:3.12:3.13; do \
	  name=$${list%%:*}; lock=requirements/$$name.lock; set -e -- $$(echo $${list#*:} | tr : ' '); \
	  $(UV) pip compile --quiet $$([ $$name = core ] && echo --universal || echo --no-deps) --generate-hashes --no-annotate \
	    --no-header --python-version $$1 requirements/$$name.in --output-file $$lock; \
	  rm -f build/$$name.toml; \
	  for python; do for machine in x86_64 aarch64; do $(UV) pip compile --quiet --no-deps --format pylock.toml \
	    --python-version $$python --python-platform $$machine-manylinux_2_39 $$lock >> build/$$name.toml; done; done; \
	  awk 'NR == FNR { while (match($$0, /sha256 = "[0-9a-f]+/)) { kept[substr($$0, RSTART + 10, 64)]; $$0 = substr($$0, RSTART + 74) }; next } \
	    /^[^ ]/ { pin = end $$0; next } substr($$1, 15) in kept { printf "%s\n    %s", pin, $$1; pin = " \\"; end = "\n" } \
	    END { print "" }' build/$$name.toml $$lock > build/$$name.lock; mv build/$$name.lock $$lock; done

setup: $(READY)

$(READY): requirements/engine.lock requirements/dev.lock pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is not there, or older than Python 3.11"; echo "  so:  nothing was installed"; \
	    echo "  try: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 129; }
	@echo "setting up .venv (about 3 GB on disk; a few minutes, once)"
	"$(PYTHON)" -m venv $$($(KEPT) || echo --clear) .venv
	$(PIP) "$(TORCH)"
	$(PIP) --no-deps --require-hashes -r requirements/engine.lock -r requirements/dev.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $(READY)

clean:
	rm -rf .venv build dist eagletwin-runs
