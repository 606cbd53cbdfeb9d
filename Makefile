# Every target sets up what it needs: a fresh machine needs Python 3.11 or newer, and make.
#
#   ARGS         words for `ratchet run`:   make run ARGS="vowels --train.epochs 3"
#   PYTEST_ARGS  words for pytest:          make test PYTEST_ARGS="tests/unit -k config"
#   PYTHON       the Python to set up with: make setup PYTHON=python3.12

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
ARGS ?=
PYTEST_ARGS ?=

.PHONY: help
help: ## Show what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Make .venv from the lock files (done by itself when needed)
	@python=$$(PYTHON='$(PYTHON)' sh image/find-python.sh) && "$$python" image/setup_env.py

.PHONY: run
run: setup ## Run the main job: the digits workload, two ranks, a local folder as the store
	@$(BIN)/ratchet run $(ARGS)

.PHONY: demo
demo: setup ## The same on a real S3 server, with kills and another number of ranks, and the proof
	@$(BIN)/python -m demo $(ARGS)

.PHONY: test
test: setup ## Run the unit and integration tests
	@$(BIN)/python -m pytest --numprocesses 2 $(PYTEST_ARGS)

.PHONY: test-crashes
test-crashes: setup ## Kill every process at every step of a save, on a folder and SeaweedFS (`make test` runs a part)
	@RATCHET_TEST_CRASHES=all $(BIN)/python -m pytest tests/integration/test_crashes.py $(PYTEST_ARGS)

.PHONY: test-servers
test-servers: setup ## The store's contract and the kills on every make of S3: SeaweedFS, MinIO, versitygw, moto
	@tests/servers/build.sh
	@RATCHET_TEST_CRASHES=all RATCHET_TEST_SERVERS=$${RATCHET_TEST_SERVERS:-all} $(BIN)/python -m pytest \
		--numprocesses 2 tests/integration/store tests/integration/test_crashes.py $(PYTEST_ARGS)

.PHONY: test-chart
test-chart: setup ## Check the chart and the manifests (needs helm, kubectl and kubeconform; see tests/cluster)
	@$(BIN)/python -m pytest tests/chart $(PYTEST_ARGS)

.PHONY: test-cluster
test-cluster: setup ## Run the tests on a real kind cluster, which is made or reused (Docker; see tests/cluster)
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/cluster $(PYTEST_ARGS)

.PHONY: image
image: ## Build the container image (IMAGE=ratchet:dev, BASE_IMAGE=, ACCELERATOR=cpu or cuda) and try it
	@nice -n 5 image/build.sh
	@image/smoke.sh $${IMAGE:-ratchet:dev}

.PHONY: lint
lint: setup ## Check style, types and layers
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

.PHONY: docs
docs: setup ## Write the generated tables of the README
	@$(BIN)/python -m trainer.docs --write README.md docs/operations.md

.PHONY: lock
lock: setup ## Write the lock files from pyproject.toml (UPGRADE=1: take the newest of everything)
	@$(BIN)/python image/lock.py

.PHONY: bench-loop
bench-loop: setup ## Compare the training loop with a bare hand-written one, Lightning, Fabric and Accelerate
	@$(BIN)/uv pip install --quiet --target .bench/loop --no-deps --require-hashes -r bench/loop/peers.lock
	@$(BIN)/python -m bench.loop $(ARGS)

.PHONY: bench-recovery
bench-recovery: setup ## Time the recovery from killed and hung ranks and pods, beside bare torchrun
	@$(BIN)/python -m bench.recovery $(ARGS)

.PHONY: bench-start
bench-start: setup ## Time the start of a pod, and weigh its supervisor
	@$(BIN)/python -m bench.start $(ARGS)

.PHONY: bench-checkpoint
bench-checkpoint: setup ## Compare checkpoints with torch.save, torch.distributed.checkpoint and a bare client
	@$(BIN)/uv pip install --quiet --target .bench/checkpoint --no-deps --require-hashes -r bench/checkpoint/peers.lock
	@$(BIN)/python -m bench.checkpoint $(ARGS)

.PHONY: clean
clean: ## Remove .venv, caches and builds; the runs in ratchet-store/ stay
	rm -rf .venv .bench build dist *.egg-info .ratchet .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find trainer tests image bench demo -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
