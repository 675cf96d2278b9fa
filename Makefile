# Every target sets up its own virtual environment first, so a fresh clone needs Python 3.11+, gcc and make.
# Another interpreter: make PYTHON=python3.13 test

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.ready
# How long `make soak` runs.
MINUTES ?= 30
# The interpreters of `make matrix`; those that are not installed are skipped with a message.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14

# An activated environment or a stray path of the caller's shell must not decide which packages we see.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME
# And what was compiled once stays: the suite starts hundreds of processes, each of which would compile all of it again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test coverage check matrix lint crash asan soak mutate bench format clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## make .venv with everything the other targets need (they all do this themselves)
	@echo "$(VENV) is ready"

# The stamp comes last: an install that broke off is done again, a finished one only when what it is made from
# changes: the install compiles the Cython modules.
$(READY): pyproject.toml hatch_build.py src/tidelog/_native.pyx src/tidelog/http/_fast_path.pyx
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tidelog needs Python 3.11+: make PYTHON=...")'
	@echo "setting up $(VENV) with $$($(PYTHON) --version), this takes a minute"
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(READY) ## a guided tour on real files, up to a shop with a million orders on Spark
	@$(RUN) -m examples.demo

# Line coverage is free with the monitoring of Python 3.12 and newer: 0 to 2 % of the tests' time. The tracer that 3.11
# needs takes 86 % more, so there only `make coverage` measures it. The floor is `fail_under` in pyproject.toml.
MONITORED = $(shell $(RUN) -c 'import sys; print("yes" if sys.version_info >= (3, 12) else "")')

# Files of tests are in memory where Linux has 8 GB for them and runs programs there: on a disk, syncs were half of the
# time of tests that have files. `make crash` uses the disk. What a failed test wrote stays in /dev/shm/pytest-of-*.
TEMPORARY = $(shell grep ' /dev/shm tmpfs ' /proc/mounts 2>/dev/null | grep -qv noexec \
  && df --output=avail /dev/shm | awk 'NR == 2 && $$1 > 8000000 { print "/dev/shm" }')
IN_MEMORY = $(if $(TEMPORARY),PYTEST_DEBUG_TEMPROOT=$(TEMPORARY))

# Three workers on two cores: many tests wait for a process or Java.
test: $(READY) ## the whole test suite; with Python 3.12 or newer also its line coverage
	@$(if $(MONITORED),true,echo "line coverage is measured with Python 3.12 or newer, or by make coverage")
	@$(IN_MEMORY) COVERAGE_CORE=sysmon $(RUN) -m pytest -n 3 --dist worksteal -m "not sweep and not cluster" $(if $(MONITORED),--cov --cov-report=)

coverage: $(READY) ## line coverage of the fast tests, with its floor; with any Python
	@$(IN_MEMORY) $(if $(MONITORED),COVERAGE_CORE=sysmon) $(RUN) -m pytest -q -n 3 --dist worksteal --cov --cov-report=term:skip-covered \
	  -m "not slow and not sweep and not cluster"

check: lint ## lint, types, tidy test and fast tests, in under a minute
	@$(RUN) -m pytest -q tests/test_tidy.py
	@$(IN_MEMORY) $(RUN) -m pytest -q -n 2 --dist worksteal -m "not slow and not sweep and not cluster" --ignore=tests/test_tidy.py

# A shim of pyenv finds an interpreter only where PYENV_VERSION or `pyenv global` names it.
matrix: export PYENV_VERSION := $(shell pyenv versions --bare 2>/dev/null | paste -sd:)
matrix: ## `make check` with every supported Python that is installed, each in an environment of its own
	@for python in $(PYTHONS); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "== $$python"; $(MAKE) --no-print-directory PYTHON=$$python VENV=.venv-$${python##*/} check || exit 1; \
	  else echo "== $$python is not installed: skipped"; fi; \
	done

lint: $(READY) ## ruff and mypy --strict
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m mypy

crash: $(READY) ## every crash state of the sweeps, and Spark with two workers; takes long
	@$(RUN) -m pytest -n 2 --dist worksteal -m "sweep or cluster"

asan: $(READY) ## the compiled modules under AddressSanitizer, with their tests and fuzzer; needs gcc and libasan
	@$(RUN) -m tests.asan

soak: $(READY) ## a server under mixed load with kills, full disks and clock jumps: make soak MINUTES=30
	@$(RUN) -m tests.soak.soak --minutes $(MINUTES)

mutate: $(READY) ## mutation testing of the code that keeps data safe; an hour on two cores
	@$(RUN) -m tests.mutation.mutate --out mutation.json

bench: $(READY) ## the benchmarks, as a table and as JSON
	@$(RUN) benchmarks/run.py

format: $(READY) ## rewrite the code the way `make check` wants it
	@$(RUN) -m ruff check --fix
	@$(RUN) -m ruff format

clean: ## remove what these targets made, .venv included; benchmark results stay
	rm -rf $(VENV) .venv-python3.* .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist demo-data .coverage*
	rm -f src/tidelog/_native.*.so src/tidelog/http/_fast_path.*.so
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
