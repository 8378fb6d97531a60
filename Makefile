# `make demo` and `make test` do all set-up themselves, in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Installed first and by itself: a bare `torch` resolves to the newest build with its CUDA packages.
TORCH  ?= torch==2.13.0

# Every test runs on one core.
PYTEST := $(BIN)/python -m pytest -m "not gpu" -n auto --maxprocesses 8

.PHONY: demo test unit functional models-table lint format bench bench-replay bench-replay-models clean help

help:
	@echo "make demo        install into $(VENV) and run the demo: three cache modes side by side"
	@echo "make test        install into $(VENV) and run all tests (unit: make unit)"
	@echo "make models-table  run the adapters' tests and write the table of docs/models.md"
	@echo "make lint        ruff check and format check"
	@echo "make bench       the benchmarks of benchmarks/, ratios measured side by side"
	@echo "make bench-replay  request traces through prefix caches; writes docs/replay.md and plots"
	@echo "make bench-replay-models  the same for five models, 1 and 8 in flight; over an hour; writes docs/replay_models.md"

demo: $(VENV)/.installed
	$(BIN)/megatron-hybrid demo

test: $(VENV)/.installed-test
	$(PYTEST) tests

unit: $(VENV)/.installed-test
	$(PYTEST) tests/unit

functional: $(VENV)/.installed-test
	$(PYTEST) tests/functional

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

bench-replay: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e ".[bench]"
	$(BIN)/python -m benchmarks.replay --memory --json benchmarks/results/replay.json \
	    --plots benchmarks/results --markdown docs/replay.md

bench-replay-models: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e ".[bench]"
	$(BIN)/python -m benchmarks.replay --full --engines ours ours-int8 vllm vllm-fine \
	    megatron-core marconi lru-block-end-16 lru-block-end-528 \
	    --json benchmarks/results/replay_models.json --markdown docs/replay_models.md

models-table: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/functional/adapters --models-table \
	    --deselect tests/functional/adapters/test_adapters.py::test_the_table_in_the_docs_is_of_these_models

lint: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet "ruff>=0.12"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet "ruff>=0.12"
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.torch:
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('$(PYTHON) is Python %d.%d; it takes 3.11 or newer: make ... PYTHON=python3.12' % sys.version_info[:2])"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install "$(TORCH)"
	@touch $@

$(VENV)/.installed: $(VENV)/.torch setup.py
	$(BIN)/python -m pip install -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.torch setup.py
	$(BIN)/python -m pip install -e ".[test]"
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
