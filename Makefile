# kp-worker: `make demo` shows it, `make test` checks it. Needs python3 (3.11 or later, with venv) and the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Where the environment forbids compiled modules, each process compiles what it imports: a worker starts in 3 s of CPU
# instead of 1, and the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' worker/version.py)

.PHONY: help setup demo test test-fast browser-test check deploy-check image image-test fuzz soak bench lock clean

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

test: $(READY) ## All tests, on real Kafka and the real model (16 minutes of CPU, side by side; ARGS=-n0: one after the other)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: $(READY) ## The tests that need neither Kafka nor the model (38 s of CPU, side by side)
	$(BIN)/python -m pytest -n logical --dist worksteal tests/unit tests/docs $(ARGS)

browser-test: $(READY) ## The status page in headless Chromium (CHROME=/path/to/chromium where it is not found)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation --editable '.[browser]'
	$(BIN)/python -m pytest tests/browser_status.py $(ARGS)

check: $(READY) ## Format, lint, types, layering
	$(BIN)/ruff format --check worker tests deploy
	$(BIN)/ruff check worker tests deploy
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_layering.py

deploy-check: $(READY) ## Check what is in deploy/ without a cluster or an engine (fetches its tools, names what it lacks)
	PYTHON=$(CURDIR)/$(BIN)/python deploy/checks/image.sh
	PYTHON=$(CURDIR)/$(BIN)/python deploy/checks/compose.sh
	PYTHON=$(CURDIR)/$(BIN)/python deploy/checks/prometheus.sh
	PYTHON=$(CURDIR)/$(BIN)/python deploy/checks/helm.sh
	deploy/checks/asyncapi.sh

image: ## Build the container image kp-worker:VERSION with Docker (TORCH_BACKEND=cpu: smaller download)
	docker build --file deploy/Dockerfile --tag kp-worker:$(VERSION) --build-arg TORCH_BACKEND=$(TORCH_BACKEND) \
	  --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) .

image-test: $(READY) ## Build the image with Docker, or buildah as root, and score traces in it on the embedded broker
	$(BIN)/python -m tests.image $(ARGS)

fuzz: $(READY) ## A million mutated documents through the parser
	$(BIN)/python -m tests.fuzz --documents 1000000 --seed $${SEED:-1}

soak: $(READY) ## Kill workers and brokers at random for MINUTES (default 30), judged by an independent oracle (ARGS=--hostile mixes hostile records in)
	$(BIN)/python -m tests.soak --minutes $${MINUTES:-30} $(ARGS)

bench: $(READY) ## Speed against peers, as ratios of one run (about 40 min; peers: pip install -e '.[bench]')
	$(BIN)/python -m tests.benchmarks $(ARGS)

lock: $(READY) ## Resolve pyproject.toml anew into requirements.lock and, for the image, requirements-image.lock
	$(BIN)/uv pip compile pyproject.toml --extra model --extra fast --extra broker --extra report --extra tracing --extra dev --universal --generate-hashes --upgrade --no-header -q -o requirements.lock
	$(BIN)/uv pip compile pyproject.toml --extra fast --constraints requirements.lock --universal --generate-hashes --no-header -q -o requirements-image.lock

clean: ## Remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
