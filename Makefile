# make chat              talk to triolet-nano; ARGS="..." is passed on, as in make chat ARGS="--model PATH_OR_HUB_ID"
# make test              the test suite, on all processors; ARGS="tests/core -x" narrows it, and runs on one
# make test-slow         the tests that take longer than a few seconds
# make test-all          both of them in one run; SLOW_FOR=SECONDS skips the slow tests that would begin later than that
# make test-ray          the tests with Ray, which it installs beside the developers' tools
# make lint              ruff and mypy --strict
# make docs              the documentation as a site, with the API reference, in build/site
# make bench             throughput of triolet and of transformers' generate, side by side
# make gpu               check and measure triolet on this machine's GPU (under 8 minutes); ARGS=--dry-run: without one
# make sbom              the packages of the environment with versions and licences (CycloneDX), in build/sbom.json
# make lock              what an installation consists of, with versions and hashes, in requirements.lock (torch is chosen per machine)
# make clean             remove the environment and everything that was built

PYTHON ?= python3
VENV ?= .venv
PACKAGE ?= --editable .
ARGS ?=

# On Linux, PyPI's torch brings the CUDA libraries along, gigabytes of them. A machine without an NVIDIA driver is better served by
# the CPU build; where its index cannot be reached, pip takes torch from wherever it takes everything else.
# `make TORCH_INDEX= ...` leaves the choice to pip.
ifeq ($(shell uname -s)$(wildcard /proc/driver/nvidia),Linux)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
endif

# Without ARGS a suite runs in as many processes as there are processors (a gigabyte each): every process takes a stretch of the files,
# and when it is done a part of another's, so that what the tests of a file share is rarely made twice. With ARGS pytest does as they
# say, in one process, where -x and --pdb are what they are; ARGS="-n 4 tests/model" has four.
SIDE_BY_SIDE = $(if $(ARGS),,--numprocesses auto --maxprocesses 8 --dist worksteal)

# The tests start hundreds of processes: each would compile the whole source where the environment forbids to keep what was compiled.
unexport PYTHONDONTWRITEBYTECODE

INSTALL = $(VENV)/bin/python tools/pip_install.py --constraint constraints.txt
INPUTS = pyproject.toml constraints.txt

.PHONY: help chat test test-slow test-all test-ray lint types docs bench gpu sbom lock clean
.DEFAULT_GOAL = help

help:
	@sed -n 's/^# make/make/p' Makefile

chat: $(VENV)/.installed
	@$(VENV)/bin/triolet chat $(ARGS)

test: $(VENV)/.installed-dev
	$(VENV)/bin/pytest $(SIDE_BY_SIDE) $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(VENV)/bin/pytest -m "slow and not gpu and not weights and not ray" $(SIDE_BY_SIDE) $(ARGS)

test-all: $(VENV)/.installed-dev
	$(VENV)/bin/pytest -m "not gpu and not weights and not ray" $(if $(SLOW_FOR),--slow-for=$(SLOW_FOR)) $(SIDE_BY_SIDE) $(ARGS)

test-ray: $(VENV)/.installed-ray
	$(VENV)/bin/pytest -m ray tests/e2e/test_ray.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	@$(MAKE) types

# Programs that import one another are a second tree: benchmarks/common.py is `common` there.
types: $(VENV)/.installed-dev
	$(VENV)/bin/mypy
	MYPYPATH=benchmarks $(VENV)/bin/mypy benchmarks/*.py examples tools/*.py

# --strict: a dead link or a missing reference is an error. The variable silences an advertisement of the theme's successor.
docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

bench: $(VENV)/.installed-dev
	$(VENV)/bin/python benchmarks/throughput.py $(ARGS)

# No set-up: a machine with a GPU has its own torch, and perhaps no package index; tools/gpu_wheels.py fetches what it lacks.
gpu:
	@$(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON)) benchmarks/gpu.py $(ARGS)

# The tool has an environment of its own: it would list itself.
sbom: $(VENV)/.installed
	$(PYTHON) -m venv build/sbom
	build/sbom/bin/pip install --quiet cyclonedx-bom==7.5.0
	build/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-file build/sbom.json $(VENV)/bin/python

# Without torch, which has another build, and so another hash, for every kind of GPU and for none; but with what torch itself needs.
TORCH_NEEDS = filelock fsspec networkx setuptools sympy typing-extensions
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet uv==0.13.9
	printf '%s\n' torch triton > build/lock/excluded.txt
	printf '%s\n' $(TORCH_NEEDS) > build/lock/needed.in
	build/lock/bin/uv pip compile --quiet pyproject.toml build/lock/needed.in --excludes build/lock/excluded.txt \
		--constraint constraints.txt --python-version 3.11 --universal --generate-hashes --no-annotate \
		--custom-compile-command "make lock" --output-file requirements.lock

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# The stamps: what triolet needs to run, and what its developers and its documentation need on top. Each is made anew when INPUTS change; a set-up that
# was interrupted leaves no stamp, and the next one goes on from there.
$(VENV)/.installed: $(VENV)/bin/python $(INPUTS)
	@echo "installing triolet into $(VENV) (once; a minute or a few)"
	@test -z "$(TORCH_INDEX)" || $(INSTALL) --no-deps --retries 0 --timeout 10 --index-url "$(TORCH_INDEX)" torch 2>/dev/null || \
		echo "  $(TORCH_INDEX) cannot be reached: torch comes from pip's own index"
	@$(INSTALL) $(PACKAGE)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed $(INPUTS)
	@echo "installing the developers' tools into $(VENV)"
	@$(INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.installed-ray: $(VENV)/.installed-dev $(INPUTS)
	@echo "installing Ray into $(VENV) (240 MB)"
	@$(INSTALL) --editable '.[ray]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed $(INPUTS)
	@echo "installing what makes the documentation into $(VENV)"
	@$(INSTALL) --editable '.[docs]'
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV)
