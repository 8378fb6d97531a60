# Every target does its own set-up, in .venv; with CORE=0.19.2, on that megatron-core in an environment of its own.
PYTHON ?= python3
CORE   ?=
VENV   ?= $(if $(CORE),.venv-core-$(CORE),.venv)
BIN    := $(VENV)/bin

# What is installed is pinned, by a file for each version of Python; PINS= installs the newest of all.
PINNED  := 3.11 3.12 3.13
VERSION := $(shell $(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])")
PINS    := constraints/python$(or $(filter $(VERSION),$(PINNED)),$(lastword $(PINNED))).txt
# Installed first and by itself, so that a CPU build that is there already stays.
TORCH   ?= torch

# Of pip only errors show; QUIET= shows the rest, such as which requirements conflict.
QUIET   ?= -qq
# A line every 10 seconds, for what is silent for longer.
TICKS := sh tests/helpers/ticks.sh
# The pins bind the builds, too; pip 26.2 and newer ask for that by a variable of its own.
HELD := $(if $(PINS),PIP_CONSTRAINT=$(VENV)/constraints.txt PIP_BUILD_CONSTRAINT=$(VENV)/constraints.txt)
PIP  := $(HELD) $(TICKS) $(BIN)/python -m pip $(QUIET) --disable-pip-version-check

# Hundreds of processes of the tests import the package: it is compiled once, whatever the caller's environment says.
export PYTHONDONTWRITEBYTECODE :=

# Every test runs on one core. Some wait for a process or for a time, so one more than there are cores runs.
CORES   := $(shell $(PYTHON) -c "import os; print(len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count())")
WORKERS := $(shell echo $$(($(CORES) < 8 ? $(CORES) + 1 : 8)))
TESTED := not gpu and not matrix
ALL    := --ignore=tests/kernels --ignore=tests/page --ignore=tests/dynamo --ignore=tests/docs --ignore=tests/ray --ignore=tests/quantizers --ignore=tests/trl --ignore=tests/megatron_main tests
PYTEST  = $(BIN)/python -m pytest -m "$(TESTED)" -n $(WORKERS) --dist worksteal

# Of what has the same bits whatever the width of a vector.
BITS := $(shell grep -rl --include="test_*.py" "mark.bits" tests)

# The tests of the door to Megatron's scripts run on the newest pinned megatron-core, too, unless an environment was chosen.
DOOR_TESTS  ?= $(wildcard tests/unit/megatron tests/functional/megatron tests/unit/checkpoints/megatron)
core_of      = $(shell sed -n "s/^megatron-core==//p" $(1))
NEWEST_CORE := $(call core_of,constraints/python$(lastword $(PINNED)).txt)
CHOSEN      := $(filter-out file,$(origin CORE) $(origin PINS) $(origin VENV))
DOOR_CORE   := $(if $(CHOSEN),,$(filter-out $(call core_of,$(PINS)),$(NEWEST_CORE)))

# It has builds of torch, Transformer Engine and apex that fit each other; PyPI has not.
GPU_CONTAINER := nvcr.io/nvidia/pytorch:25.12-py3
GPU_CORE      := $(or $(CORE),$(NEWEST_CORE))
GPU_VENV      := .venv-gpu-core-$(GPU_CORE)

.PHONY: demo tour demo-curve test bits door-tests kernel-tests kernel-tests-torch-2.11 interpreted-tests compile-kernels compiled-kernels test-page test-serve-ranks test-attacks test-megatron megatron-tests test-dynamo dynamo-tests bench-dynamo dynamo-bench test-ray ray-tests test-quantizers quantizers-tests test-trl trl-tests \
        unit functional test-matrix test-clients test-schemas speculation-fuzz soak soak-ranks soak-training test-gpu gpu-tests gpu-wheels test-newest test-wheel demo-of-wheel models-table docs docs-serve build-docs serve-docs test-docs lint format lock bench bench-replay bench-replay-models clean help

help:
	@echo "make demo          compare the three cache modes on the same requests"
	@echo "make tour          run the cells of examples/tour.ipynb; one minute"
	@echo "make demo-curve    train 200 steps of the demo model;"
	@echo "                   docs/guides/demo_training.md"
	@echo "make test          run all tests; those of Megatron's interface also run on"
	@echo "                   megatron-core $(NEWEST_CORE). make unit, make functional and"
	@echo "                   make kernel-tests run a part of the tests"
	@echo "make bits          run the tests of bits under each narrower vector of this CPU;"
	@echo "                   make test includes it"
	@echo "make test-matrix   run all rows of test matrices; make test runs one of a kind"
	@echo "make kernel-tests-torch-2.11  test the kernels on torch 2.11 with Triton 3.6"
	@echo "make compile-kernels  compile the kernels of all published models, without a GPU"
	@echo "make test-page     test the server's page in chromium, with screenshots"
	@echo "make test-serve-ranks  test servers over two ranks, by TP, PP and EP; two"
	@echo "                   minutes. make test-matrix includes these tests"
	@echo "make test-dynamo   test two workers behind NVIDIA Dynamo's frontend; four"
	@echo "                   minutes. make bench-dynamo measures their cost and reuse"
	@echo "make test-ray      test replicas on Ray Serve, of 1 and 2 ranks; three minutes"
	@echo "make test-quantizers  test folders that packages of quantization write; a"
	@echo "                   quarter of an hour"
	@echo "make test-trl      test published chat templates, losses and adapters next to"
	@echo "                   those of TRL and peft"
	@echo "make test-megatron MEGATRON_LM=PATH  test Megatron's interface, and its scripts"
	@echo "                   and rollouts, on a clone of Megatron-LM; prints the tables of"
	@echo "                   docs/reference/megatron_tests.md; a quarter of an hour"
	@echo "make test-attacks  test the server against hostile clients; one minute"
	@echo "make test-gpu      run the tests for GPUs, in NVIDIA's container for PyTorch"
	@echo "make gpu-wheels    download the wheels of benchmarks.gpu.first_run to wheels/gpu"
	@echo "make test-clients  test the server with the anthropic package as its client"
	@echo "make test-schemas  count what guides allow of the JSON-Schema-Test-Suite"
	@echo "make soak          run long random tests: 200 clients of a server for five"
	@echo "                   minutes, Ctrl-C in 3,000 engines, 100,000 steps with failing"
	@echo "                   allocations, 20,000 guides of a kind, 1,000 caches; an hour"
	@echo "make speculation-fuzz  run 20,000 requests with drafts and without; an hour"
	@echo "make soak-ranks    kill, stop, block or fail one rank of three; half an hour"
	@echo "make soak-training  kill a training run 30 times: a rank, all ranks or torchrun;"
	@echo "                   a quarter of an hour"
	@echo "make test-newest   run all tests on the newest releases, in .venv-newest"
	@echo "make test-wheel    run the demo from a built wheel in an empty environment"
	@echo "make models-table  test the adapters, and write docs/reference/models.md's table"
	@echo "make docs          build the docs site in site/; make docs-serve shows it at"
	@echo "                   port 8001, and updates it after each change of a page"
	@echo "make test-docs     run the code blocks of the docs and of README.md"
	@echo "make lint          check style, and the types of the public API; make format"
	@echo "                   repairs the style"
	@echo "make lock          resolve the pins of constraints/ again"
	@echo "make bench         run the benchmarks of benchmarks/, with ratios of one run"
	@echo "make bench-replay  replay request traces through prefix caches, for"
	@echo "                   docs/measured/replay.md"
	@echo "make bench-replay-models  replay them for five models; over an hour"
	@echo "make clean         remove the environments and built files"
	@echo "A target first installs what it needs into .venv. make TARGET CORE=0.19.2 takes"
	@echo "that megatron-core, in .venv-core-0.19.2; make TARGET PYTHON=python3.12 takes"
	@echo "that Python."

demo: $(VENV)/.installed
	$(BIN)/megatron-hybrid demo

tour: $(VENV)/.installed
	$(TICKS) $(BIN)/python tests/helpers/notebook.py examples/tour.ipynb

# npm and apt-get fetch the text. Under 10 minutes on two quiet cores; a run that was stopped goes on.
demo-curve: $(VENV)/.installed
	$(BIN)/python examples/demo_corpus.py runs/text
	for part in train held_out; do \
	    test -f runs/text/$$part.idx || $(BIN)/megatron-hybrid preprocess runs/text/$$part.jsonl \
	        --tokenizer demo --output runs/text/$$part || exit 1; \
	done
	CUDA_VISIBLE_DEVICES= $(BIN)/torchrun --nproc-per-node 2 examples/demo_curve.py

test: $(VENV)/.installed-test
	$(PYTEST) $(ALL)
	$(MAKE) --no-print-directory bits
	$(if $(and $(DOOR_CORE),$(DOOR_TESTS)),$(MAKE) door-tests CORE=$(DOOR_CORE))
	$(if $(CHOSEN),,$(MAKE) kernel-tests)

# The rows of matrices of whose kind `make test` runs another one: about as long again.
test-matrix: TESTED := not gpu and matrix
test-matrix: $(VENV)/.installed-test
	$(PYTEST) $(ALL)
	$(if $(CHOSEN),,$(MAKE) kernel-tests TESTED="$(TESTED)")

# `make test` has the widest vectors; here are the others that this machine has.
bits: $(VENV)/.installed-test
	for each in $$($(BIN)/python tests/helpers/cpu_capabilities.py); do \
	    echo "ATEN_CPU_CAPABILITY=$$each"; \
	    ATEN_CPU_CAPABILITY=$$each $(TICKS) $(BIN)/python -m pytest -q -m bits $(BITS) || exit 1; \
	done

door-tests: $(VENV)/.installed-test
	$(PYTEST) $(DOOR_TESTS)

# On the newest pinned megatron-core, whose kernels are tested, too. In an environment of their own: where fla-core is, every process
# imports it, and warns that there is no GPU.
kernel-tests:
	@$(MAKE) --no-print-directory interpreted-tests VENV=.venv-kernels CORE=$(NEWEST_CORE)

kernel-tests-torch-2.11:
	@$(MAKE) --no-print-directory interpreted-tests VENV=.venv-torch-2.11 CORE=$(NEWEST_CORE) PINS=constraints/torch2.11.txt

interpreted-tests: $(VENV)/.installed-kernels
	$(PYTEST) tests/kernels

# A line of JSON for each kernel, then the table of docs/measured/gpu.md. About an hour on two cores.
compile-kernels:
	@$(MAKE) --no-print-directory compiled-kernels VENV=.venv-kernels CORE=$(NEWEST_CORE)

compiled-kernels: $(VENV)/.installed-kernels
	$(TICKS) $(BIN)/python tests/helpers/ahead_of_time.py

# Screenshots are in runs/page.
test-page: $(VENV)/.installed-test $(VENV)/.installed-page
	@command -v chromium > /dev/null || { echo "make test-page needs chromium: apt-get install chromium"; exit 1; }
	$(TICKS) $(BIN)/python -m pytest tests/page

# A server a layout; the launcher's ranks are killed, and the launcher. Two minutes.
test-serve-ranks: $(VENV)/.installed-test
	$(TICKS) $(BIN)/python -m pytest -m "not gpu" -s tests/functional/serving/test_serve_over_ranks.py

# In an environment of its own: what Dynamo asks for would not go together with the rest.
test-dynamo:
	@$(MAKE) --no-print-directory dynamo-tests VENV=.venv-dynamo

dynamo-tests: $(VENV)/.dynamo
	$(TICKS) $(BIN)/python -m pytest -s tests/dynamo

bench-dynamo:
	@$(MAKE) --no-print-directory dynamo-bench VENV=.venv-dynamo

dynamo-bench: $(VENV)/.dynamo
	$(TICKS) $(BIN)/python -m benchmarks.dynamo

$(VENV)/.dynamo: $(VENV)/.installed-test tests/dynamo/requirements.txt
	@echo "Installing Dynamo into $(VENV)"
	@$(TICKS) $(BIN)/python -m pip $(QUIET) --disable-pip-version-check install --no-deps -r tests/dynamo/requirements.txt
	@touch $@

# core is that of the clone, and its server needs packages that ours does not.
test-megatron:
	@test -d "$(MEGATRON_LM)/megatron/rl" || { echo "say where a clone of Megatron-LM is: make test-megatron MEGATRON_LM=PATH"; exit 1; }
	@$(MAKE) --no-print-directory megatron-tests CORE=$(GPU_CORE) VENV=.venv-megatron

megatron-tests: $(VENV)/.megatron
	PYTHONPATH=$(CURDIR)/tests/megatron_main:$(abspath $(MEGATRON_LM)) \
	    $(TICKS) $(BIN)/python -m pytest --show-capture=no -m "$(TESTED)" tests/megatron_main $(DOOR_TESTS)

$(VENV)/.megatron: $(VENV)/.installed-test tests/megatron_main/requirements.txt
	@$(TICKS) $(BIN)/python -m pip $(QUIET) --disable-pip-version-check install -r tests/megatron_main/requirements.txt
	@touch $@

# In an environment of its own: Ray brings some forty packages.
test-ray:
	@$(MAKE) --no-print-directory ray-tests VENV=.venv-ray

ray-tests: $(VENV)/.ray
	$(TICKS) $(BIN)/python -m pytest -s tests/ray

$(VENV)/.ray: $(VENV)/.installed-test tests/ray/requirements.txt
	@echo "Installing Ray into $(VENV)"
	@$(PIP) install -r tests/ray/requirements.txt
	@touch $@

# In an environment of its own: six packages that pin each other's releases, and patch transformers.
test-quantizers:
	@$(MAKE) --no-print-directory quantizers-tests VENV=.venv-quantizers

quantizers-tests: $(VENV)/.quantizers
	$(TICKS) $(BIN)/python -m pytest -s tests/quantizers

$(VENV)/.quantizers: $(VENV)/.installed-test tests/quantizers/requirements.txt
	@echo "Installing packages of quantization into $(VENV)"
	@$(TICKS) $(BIN)/python -m pip $(QUIET) --disable-pip-version-check install --no-deps -r tests/quantizers/requirements.txt
	@touch $@

# In an environment of its own: TRL brings accelerate and datasets, unless it comes without.
test-trl:
	@$(MAKE) --no-print-directory trl-tests VENV=.venv-trl

trl-tests: $(VENV)/.installed-test
	@$(TICKS) $(BIN)/python -m pip $(QUIET) --disable-pip-version-check install --no-deps -r tests/trl/requirements.txt
	$(TICKS) $(BIN)/python -m pytest -s tests/trl

test-attacks: $(VENV)/.installed-test
	$(TICKS) $(BIN)/python tests/helpers/attacks.py

# A client that no test of `make test` needs, beside the environment.
test-clients: $(VENV)/.installed-test
	$(BIN)/python -m pip install -q --no-deps --target .clients anthropic==2.10.0 docstring_parser==0.18.0 httpx2==2.16.2 httpcore2==2.16.2 truststore==0.10.5
	PYTHONPATH=.clients $(BIN)/python -m pytest tests/helpers/anthropic_client.py

# The suite lies in the sources of jsonschema, which are fetched beside the environment.
test-schemas: $(VENV)/.installed-test
	$(BIN)/python -m pip $(QUIET) --disable-pip-version-check download --no-deps --no-binary :all: --dest .schemas jsonschema==4.26.0
	tar xzf .schemas/jsonschema-4.26.0.tar.gz -C .schemas
	PYTHONPATH=. $(TICKS) $(BIN)/python tests/helpers/json_schema_suite.py .schemas/jsonschema-4.26.0/json/tests/draft2020-12

unit: $(VENV)/.installed-test
	$(PYTEST) tests/unit

functional: $(VENV)/.installed-test
	$(PYTEST) tests/functional

# torch is that of $(PYTHON), and so are Transformer Engine and apex where it has them, all held by pins.txt; of the rest
# megatron-core alone is pinned. Tests of Transformer Engine skip without it.
test-gpu:
	@gpus=$$($(PYTHON) tests/helpers/gpu_machine.py $(GPU_CONTAINER)) && mkdir -p $(GPU_VENV) && \
	    $(PYTHON) -m pip --disable-pip-version-check list --format freeze | \
	    grep -iE "^(torch|transformer.engine.*|apex|triton|pytorch.triton|numpy)==" > $(GPU_VENV)/found.txt && \
	    { cmp -s $(GPU_VENV)/found.txt $(GPU_VENV)/pins.txt || mv $(GPU_VENV)/found.txt $(GPU_VENV)/pins.txt; } && \
	    $(MAKE) --no-print-directory gpu-tests GPUS=$$gpus CORE=$(GPU_CORE) VENV=$(GPU_VENV) \
	        PINS=$(GPU_VENV)/pins.txt TORCH=torch VENV_OPTIONS="--system-site-packages --without-pip"

gpu-tests: $(VENV)/.installed-test $(VENV)/.installed-gpu
	$(TICKS) $(BIN)/python -m pytest -m gpu tests
	@$(if $(filter 1,$(GPUS)),echo "One GPU: the tests of two ranks do not run; they need two.")
	$(if $(filter-out 1,$(GPUS)),$(TICKS) $(BIN)/python -m torch.distributed.run --nproc-per-node 2 -m pytest -x tests/functional/test_two_gpus.py)

# For Python 3.12 on Linux, whatever runs here. The first run installs them.
gpu-wheels:
	rm -rf wheels/gpu
	$(TICKS) $(PYTHON) -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	    --platform manylinux_2_28_x86_64 --dest wheels/gpu megatron-core==$(NEWEST_CORE) $(shell grep "^fla-core==" constraints/torch2.11.txt)

# Clients of a server that leave, lag and err; Ctrl-C at random moments; engine steps of which every other one meets failing allocations;
# random guides; random calls of the cache.
soak: $(VENV)/.installed-test
	$(TICKS) $(BIN)/python tests/helpers/server_soak.py
	$(TICKS) $(BIN)/python tests/helpers/interrupted.py
	$(TICKS) $(BIN)/python tests/helpers/memory_fuzz.py && $(TICKS) $(BIN)/python tests/helpers/extreme_sampling.py 18000 2000
	GUIDE_EXAMPLES=20000 CACHE_EXAMPLES=1000 PARSER_EXAMPLES=20000 $(TICKS) $(BIN)/python -m pytest tests/unit/serving/parsers/test_answer_parser.py tests/unit/text/test_guide_fuzz.py tests/unit/cache/test_prefix_cache_machine.py

# Random runs of engines with drafts, of 20,000 requests; an hour.
speculation-fuzz: $(VENV)/.installed-test
	$(TICKS) $(BIN)/python tests/helpers/drafted.py 20000

# The time until all ranks have ended, for each fault at each moment.
soak-ranks: $(VENV)/.installed-test
	$(TICKS) $(BIN)/python tests/helpers/rank_faults.py

# Kills of one rank, of all and of the launcher, each at ten moments; what is left of processes, and the losses after it.
soak-training: $(VENV)/.installed-test
	$(TICKS) $(BIN)/python tests/helpers/training_soak.py

test-newest:
	rm -rf .venv-newest
	$(MAKE) test VENV=.venv-newest PINS=

test-wheel:
	@folder=$$(mktemp -d) && trap "rm -rf $$folder" EXIT && \
	    $(MAKE) --no-print-directory demo-of-wheel VENV=$$folder/venv

# Built from a copy, because an old build/ would end up in the wheel; run from a folder that is not the checkout.
demo-of-wheel: $(VENV)/.base
	mkdir $(VENV)/source
	cp -r megatron_hybrid setup.py pyproject.toml README.md LICENSE $(VENV)/source
	$(PIP) wheel --no-deps --wheel-dir $(VENV)/wheel $(VENV)/source
	rm -r $(VENV)/source
	$(PIP) install $(VENV)/wheel/*.whl
	cd $(VENV) && bin/megatron-hybrid demo > demo.txt; cat demo.txt
	@grep -q "identical outputs" $(VENV)/demo.txt
	@cd $(VENV) && bin/python -c "import megatron_hybrid as m; print(m.__file__)" | grep "/venv/lib/.*/site-packages/"
	@ls $(VENV)/lib/*/site-packages/megatron_hybrid/serving/page/index.html

bench: $(VENV)/.installed
	$(TICKS) $(BIN)/python -m benchmarks

bench-replay: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.replay --memory --json benchmarks/results/replay.json \
	    --plots docs/plots --markdown docs/measured/replay.md

bench-replay-models: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.replay --full --engines ours ours-int8 vllm sglang mcore marconi \
	    lru-16 lru-528 \
	    --json benchmarks/results/replay_models.json \
	    --plots docs/plots --markdown docs/measured/replay.md

models-table: $(VENV)/.installed-test
	$(TICKS) $(BIN)/python -m pytest tests/functional/huggingface --models-table \
	    --deselect tests/functional/huggingface/test_adapters.py::test_the_table_in_the_docs_is_of_these_models

# In an environment of its own, without torch: the site is made from the package's source.
docs:
	@$(MAKE) --no-print-directory build-docs VENV=.venv-docs

docs-serve:
	@$(MAKE) --no-print-directory serve-docs VENV=.venv-docs

build-docs: $(VENV)/.docs
	@echo "Building the docs site: pages of docs/, and references from the package's source"
	@NO_MKDOCS_2_WARNING=1 $(TICKS) $(BIN)/python -m mkdocs build
	@echo "Built it: open site/index.html"

serve-docs: $(VENV)/.docs
	@echo "Serving the docs site on http://127.0.0.1:8001; it follows changes of pages"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8001 --watch megatron_hybrid --watch docs_tools

# What the extra asks for alone: the package's own requirements are not needed.
$(VENV)/.docs: setup.py $(PINS)
	@echo "Installing what builds the docs into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(if $(PINS),cp $(PINS) $(VENV)/constraints.txt)
	@$(PIP) install --upgrade pip setuptools
	@$(PIP) install $$($(BIN)/python -c "import setuptools, distutils.core as core; print(*core.run_setup('setup.py', stop_after='init').extras_require['docs'])")
	@touch $@

# Every block of a page runs, on a demo server at port 8000 where it calls one.
test-docs: $(VENV)/.installed-test $(VENV)/.installed-dev
	$(TICKS) $(BIN)/python -m pytest tests/docs

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(TICKS) $(BIN)/mypy
	$(TICKS) $(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# With CORE: 0.19.2 asks for Python 3.12, but has a wheel for 3.11, too, and that runs. From 0.18 on it imports triton.
$(VENV)/.base: $(PINS)
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('$(PYTHON) is Python %d.%d; it takes 3.11 or newer: make ... PYTHON=python3.12' % sys.version_info[:2])"
	@echo "Installing $(TORCH)$(if $(CORE), and megatron-core==$(CORE)) into $(VENV), with $(or $(PINS),the newest releases)"
	@$(if $(and $(PINS),$(filter-out $(PINNED),$(VERSION))),echo "No pins for Python $(VERSION): those for $(lastword $(PINNED)) are used.")
	@$(PYTHON) -m venv $(VENV_OPTIONS) $(VENV)
	@$(if $(PINS),sed "s/^megatron-core==.*/$(if $(CORE),megatron-core==$(CORE),&)/" $(PINS) > $(VENV)/constraints.txt)
	@$(PIP) install --upgrade pip
	@$(PIP) install "$(TORCH)"
	@$(if $(CORE),$(PIP) install --no-deps --ignore-requires-python megatron-core==$(CORE))
	@$(if $(CORE),$(PIP) install "triton>=3; platform_system == 'Linux'")
	@touch $@

$(VENV)/.installed: $(VENV)/.base setup.py
	@echo "Installing megatron_hybrid into $(VENV)"
	@$(PIP) install -e .
	@touch $@

$(VENV)/.installed-%: $(VENV)/.base setup.py
	@echo "Installing megatron_hybrid[$*] into $(VENV)"
	@$(PIP) install -e ".[$*]"
	@touch $@ $(VENV)/.installed

# $(call resolve,file,Python,what is pinned beside what setup.py asks for), from metadata alone.
define resolve
printf "%s\n" pip setuptools $(3) | $(TICKS) .venv-lock/bin/uv pip compile --quiet --upgrade \
    --python-version $(2) --python-platform linux --no-annotate --custom-compile-command "make lock" \
    --extra test --extra kernels --extra page --extra bench --extra dev --extra docs --output-file constraints/$(1).txt setup.py -
endef

# In an environment of its own: that of the tests may not install while a pin is wrong. The interpreter of torch 2.11's Triton cannot read
# arrays of numpy 2.4. A *.requires is what PyPI's build of a pinned torch asks for; === leaves out builds such as 2.13.0+cpu.
lock:
	@$(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/python -m pip $(QUIET) --disable-pip-version-check install $(if $(wildcard $(PINS)),--constraint $(PINS)) pip uv
	for version in $(PINNED); do $(call resolve,python$$version,$$version,torch==2.13.0) || exit 1; done
	$(call resolve,torch2.11,$(firstword $(PINNED)),torch==2.11.0 "numpy<2.4")
	rm -f constraints/*.requires
	for torch in $$(sed -n "s/^torch==//p" constraints/*.txt | sort -u); do \
	    .venv-lock/bin/python -m pip -qq install --dry-run --no-deps --ignore-installed --report - torch===$$torch | .venv-lock/bin/python -c \
	        "import json, sys; print(*json.load(sys.stdin)['install'][0]['metadata']['requires_dist'], sep='\n')" \
	        > constraints/torch-$$torch.requires || exit 1; \
	done

clean:
	rm -rf $(sort $(VENV) .venv) .venv-* .schemas build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
