# Every target sets itself up: `make demo` works on any machine with Python 3.11 or newer, git and make.
#
#   PYTHON=python3.13     the interpreter for the virtual environment
#   DEMO_ARGS="…"         options for `gradserver demo`
#   TEST_ARGS="…"         options for pytest
#   CHAOS_ARGS="…"        options for `gradserver chaos`
#   TORCH=2.14.1          the version of torch for `make conformance`, in an environment of its own
#   CONFORMANCE_ARGS="…"  options for `python -m tests.conformance`
#   CHURN_SECONDS=1200    time for courses of DataRanges in `make chaos-long`
#   GPU_PYTHON=python3    the interpreter for `make gpu`, as it is: with torch, on a machine with a GPU
#   GPU_ARGS="…"          options for `make gpu`, such as --only copies,overlap

PYTHON ?= python3
DEMO_ARGS ?=
TEST_ARGS ?=
CHAOS_ARGS ?=
GPU_ARGS ?=
TORCH ?=
CONFORMANCE_ARGS ?=
CHURN_SECONDS ?= 300

VENV := .venv
BIN := $(VENV)/bin
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
LOWEST := .venv-lowest
TRAINERS := .venv-trainers
OTHER := .venv-torch-$(TORCH)
STAMP := $(VENV)/.installed-$(subst /,-,$(PYTHON))
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The tests start hundreds of processes. Where this is set, each would compile everything anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-numpy test-long test-lowest test-trainers chaos chaos-long kills mutants conformance \
  gpu docs check format clean

help: ## Show this list
	@echo "gradserver: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## Create .venv and install everything, pinned (other targets do this themselves)

demo: $(STAMP) ## Train a small language model with two workers and a coordinator on this machine
	@$(BIN)/gradserver demo $(DEMO_ARGS)

# Four processes for two cores: some tests wait for silence to be noticed, and use no core meanwhile.
test: $(STAMP) ## Run the tests, apart from the long ones
	$(BIN)/pytest -m "not long and not trainers" --numprocesses 4 --dist worksteal $(TEST_ARGS)

# Without kernels: what tests all that kernels do. `make test` has them.
test-numpy: $(STAMP) ## Run the tests of codecs and reductions without compiled kernels
	GRADSERVER_KERNELS=numpy $(BIN)/pytest -m "not long" --numprocesses 2 --dist worksteal $(TEST_ARGS) \
	  $(addprefix tests/test_,$(addsuffix .py,codecs reducer lossy comparison kernels))

test-long: $(STAMP) ## Run the long tests, and property tests with twenty-five times the examples
	GRADSERVER_TEST_EXAMPLES=10 $(BIN)/pytest -m "(long or hypothesis) and not trainers" --numprocesses 2 --dist worksteal \
	  --timeout 300 $(TEST_ARGS)

test-lowest: ## Run the tests with the oldest supported dependencies (lowest.txt), in .venv-lowest
	@[ -x $(LOWEST)/bin/pytest ] || { $(PYTHON) -m venv --clear $(LOWEST) && \
	  $(LOWEST)/bin/python -m pip -qq --disable-pip-version-check install -c lowest.txt -e '.[demo]' \
	    hypothesis pytest pytest-timeout; }
	@# Old libraries use what newer ones have deprecated. So warnings fail the usual tests only. Others need a linter.
	$(LOWEST)/bin/pytest -m "not long and not trainers" -W default $(addprefix --ignore tests/test_,import_rules.py mutants.py packaging.py) \
	  --deselect tests/test_deploy.py::test_container_is_built_from_all_that_the_package_needs $(TEST_ARGS)

# Trainers lie beside .venv, so that no other test depends on what they bring along.
test-trainers: $(TRAINERS)/.installed ## Run trainers (Lightning, Accelerate, transformers, Ray) over the backend of torch
	$(TRAINERS)/bin/python -m pytest -m trainers -p no:cacheprovider --numprocesses 2 --dist worksteal $(TEST_ARGS) \
	  tests/test_trainers.py

$(TRAINERS)/.installed: $(STAMP) pyproject.toml constraints.txt
	@echo "Setting up $(TRAINERS): the pinned trainers. Takes one to five minutes and 500 MB."
	@$(BIN)/python -m venv --clear $(TRAINERS)
	@$(BIN)/python -c 'import site; print(*(f"import site; site.addsitedir({one!r})" for one in site.getsitepackages()), sep="\n")' \
	  > "$$($(TRAINERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	@$(TRAINERS)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt $$($(BIN)/python -c 'import \
	  pathlib, tomllib; print(*tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]["optional-dependencies"]["trainers"])')
	@touch $@

# What continuous integration runs: less than a minute. Gradients, a lossy wire over three shards, and local SGD.
chaos: $(STAMP) ## Disturb three groups for a quarter of a minute each, and recompute every round
	$(BIN)/gradserver chaos --workers 6 --seconds 13 --least 5 $(CHAOS_ARGS)
	$(BIN)/gradserver chaos --workers 6 --seconds 12 --least 3 --shards 3 --apart 4 --wire int8 $(CHAOS_ARGS)
	$(BIN)/gradserver chaos --workers 4 --seconds 12 --least 2 --local nesterov --fragments 2 $(CHAOS_ARGS)

chaos-long: $(STAMP) ## Disturb groups of each kind for a minute each, and DataRanges for five in all modes
	$(BIN)/gradserver chaos --workers 8 --seconds 60 --least 70 $(CHAOS_ARGS)
	$(BIN)/gradserver chaos --workers 8 --seconds 60 --least 60 --shards 3 --apart 4 $(CHAOS_ARGS)
	for mode in bounded async; do $(BIN)/gradserver chaos --mode $$mode --workers 6 --shards 2 --seconds 60 --every 1.5 \
	  --events kill,midpush,slow,join,shard --coordinator-kill 12 --stall 20 $(CHAOS_ARGS) || exit 1; done
	for local in average nesterov; do for wire in fp32 int8; do $(BIN)/gradserver chaos --local $$local --fragments 2 \
	  --wire $$wire --workers 6 --shards 2 --seconds 60 --every 1.5 --events kill,midpush,slow,join,shard \
	  --coordinator-kill 12 --stall 20 $(CHAOS_ARGS) || exit 1; done; done
	for wire in bf16 fp16 topk:0.05 randomk:0.1; do $(BIN)/gradserver chaos --wire $$wire --workers 6 --seconds 60 \
	  --every 1.5 --events kill,midpush,slow,join --coordinator-kill 12 --stall 20 $(CHAOS_ARGS) || exit 1; done
	for plane in direct hierarchical quicker; do $(BIN)/gradserver chaos --plane $$plane --workers 6 --seconds 60 \
	  --every 1.5 --events kill,midpush $(CHAOS_ARGS) || exit 1; done
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.churn_ranges --seconds $(CHURN_SECONDS)

kills: $(STAMP) ## Kill the coordinator every three seconds under each kind of group, and compare the weights
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.kills

mutants: $(STAMP) ## Plant faults in copies of the product, and let chaos find each of them
	$(BIN)/python -m tests.mutants

# Another version of torch has requirements of its own: nothing is pinned there.
conformance: $(if $(TORCH),$(OTHER)/.installed,$(STAMP)) ## Run torch's own tests of torch.distributed with gloo and with gradserver
	$(if $(TORCH),$(OTHER)/bin,$(BIN))/python -m tests.conformance $(CONFORMANCE_ARGS)

$(OTHER)/.installed:
	$(PYTHON) -m venv --clear $(OTHER)
	$(OTHER)/bin/python -m pip -qq --disable-pip-version-check install 'torch==$(TORCH)' expecttest pytest -e .
	@touch $@

# No setup: a machine with a GPU has a torch of its own, and perhaps no network.
gpu: ## Run everything that needs a GPU, and write docs/gpu.md
	@$(GPU_PYTHON) -m tests.gpu $(GPU_ARGS)

# Without --quiet: warnings that it hides do not count for --strict either.
docs: $(STAMP) ## Build the documentation into site/: open site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: $(STAMP) docs ## Check style, types, imports, structure, documentation, and the wheel
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.structure
	$(BIN)/pytest --quiet tests/test_packaging.py

format: $(STAMP) ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## Remove everything that the other targets made, .venv included
	rm -rf $(VENV) $(LOWEST) $(TRAINERS) .venv-torch-* build dist site .hypothesis .import_linter_cache \
	  .mypy_cache .pytest_cache .ruff_cache
	find gradserver protocol worker tests -type d -name __pycache__ -prune -exec rm -rf {} +

# Hatchling is installed first, so that the project is built with the pinned one. The stamp has the interpreter's name, so
# that another one is noticed. An environment of another version is emptied first.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: there is no '$(PYTHON)' here. Install Python 3.11 or newer (Debian, Ubuntu: apt install" \
	    "python3 python3-venv), or name yours: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: gradserver needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	    "Install a newer one (Debian, Ubuntu: apt install python3.11 python3.11-venv, where there is one)" \
	    "and name it: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' cannot create virtual environments. Debian, Ubuntu: apt install" \
	    "$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"; exit 1; }
	@echo "Setting up $(VENV), once: PyTorch and the other pinned packages. Takes one to five minutes and 1.5 GB, mostly download."
	@[ "$$($(BIN)/python --version 2>&1)" = "$$($(PYTHON) --version)" ] || clear=--clear; \
	  $(PYTHON) -m venv $$clear $(VENV)
	@$(PIP) install -c constraints.txt hatchling
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev,docs,demo,fast]'
	@$(BIN)/python -m compileall -q gradserver protocol worker  # pip does this, but not for a checkout
	@echo "Compiling kernels, half a minute at most."
	@$(BIN)/gradserver kernels compile
	@touch $@
	@echo "Done. For the command gradserver in this terminal: . $(BIN)/activate"
