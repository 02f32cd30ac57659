# kp-worker: `make demo` shows it, `make test` checks it. Needs python3 (3.11 or later, with venv) and the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test check deploy-check fuzz soak bench lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## Create .venv with exactly what requirements.lock says

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: set PYTHON=/path/to/python3.11 (or later)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "this Python has no venv: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	$(BIN)/kp-worker export-model --if-missing
	@touch $(READY)

demo: $(READY) ## Embedded Kafka, real model, sample traces: everything at once (ARGS=--keep-running to look around)
	$(BIN)/kp-worker demo $(ARGS)

test: $(READY) ## All tests, on real Kafka and the real model (15 to 25 minutes)
	$(BIN)/python -m pytest $(ARGS)

check: $(READY) ## Format, lint, types, layering
	$(BIN)/ruff format --check worker tests
	$(BIN)/ruff check worker tests
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py

deploy-check: $(READY) ## Check what is in deploy/ without an engine or a cluster (each check names the tool that it lacks)
	PYTHON=$(CURDIR)/$(BIN)/python deploy/checks/prometheus.sh
	PYTHON=$(CURDIR)/$(BIN)/python deploy/checks/helm.sh

fuzz: $(READY) ## A million mutated documents through the parser
	$(BIN)/python -m tests.fuzz --documents 1000000 --seed $${SEED:-1}

soak: $(READY) ## Kill workers and brokers at random for MINUTES (default 30), compare with an independent oracle
	$(BIN)/python -m tests.soak --minutes $${MINUTES:-30}

bench: $(READY) ## Speed against peers, as ratios of one run (about 40 min; peers: pip install -e '.[bench]')
	$(BIN)/python -m tests.benchmarks $(ARGS)

lock: $(READY) ## Resolve pyproject.toml anew into requirements.lock
	$(BIN)/uv pip compile pyproject.toml --extra model --extra fast --extra broker --extra report --extra dev --universal --generate-hashes --upgrade --no-header -q -o requirements.lock

clean: ## Remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
