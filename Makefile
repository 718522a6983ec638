# Everything a user or CI runs. `make help` lists the targets.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PY := .venv/bin/python
# One of cpu, cuda: which SGLang is installed and where `make serve` runs.
DEVICE ?= $(if $(shell nvidia-smi -L 2>/dev/null),cuda,cpu)

SGLANG_SSD_HOME ?= $(HOME)/.cache/sglang-ssd
export SGLANG_SSD_HOME
DEMO_TARGET := $(SGLANG_SSD_HOME)/models/Qwen2.5-Coder-1.5B-Instruct
DEMO_DRAFT := $(SGLANG_SSD_HOME)/models/Qwen2.5-Coder-0.5B-Instruct

MODEL ?=
DRAFT ?=
ifneq ($(if $(MODEL),given),$(if $(DRAFT),given))
$(error MODEL=$(MODEL) DRAFT=$(DRAFT): give both, or none for the demo pair)
endif
HOST ?= 127.0.0.1
PORT ?= 30000
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14
	@echo
	@echo '  MODEL=path DRAFT=path   another pair for `make serve`'
	@echo '  HOST=127.0.0.1 PORT=30000 ARGS="--ssd-... --any-flag-of-sglang ..."'
	@echo '  ARGS="-k name"          for `make test`, likewise for bench-e2e'
	@echo '  DEVICE=cpu|cuda PYTHON=python3.11 SGLANG_SSD_HOME=~/.cache/sglang-ssd'

# --- environment ---------------------------------------------------------------------------------------------
# The stamp is written last: an install that was interrupted is repeated, one that is done is not looked at again.
ENV_STAMP := .venv/.installed-$(DEVICE)
REQUIREMENTS_cpu := requirements/cpu.txt requirements/cpu-sglang.txt
REQUIREMENTS_cuda := requirements/cuda.txt
BUILD_FILES := python/pyproject.toml $(wildcard sgl-kernel/pyproject.toml sgl-kernel/setup.py sgl-kernel/*.pth \
                                                sgl-kernel/csrc/cpu/*)

.PHONY: env
env: $(ENV_STAMP)  ## create .venv with everything pinned

$(ENV_STAMP): $(REQUIREMENTS_$(DEVICE)) requirements/dev.txt $(BUILD_FILES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo 'PYTHON=$(PYTHON): Python 3.11 or later is needed' >&2; exit 1; }
	@echo 'Installing into .venv for $(DEVICE): a few minutes, some 7 GB'
	$(PYTHON) -m venv .venv
	rm -f .venv/.installed-*
	$(PY) -m pip install -r requirements/$(DEVICE).txt -r requirements/dev.txt
ifeq ($(DEVICE),cpu)
	$(PY) -m pip install --no-deps -r requirements/cpu-sglang.txt
endif
	$(PY) -m pip install --no-deps --no-build-isolation --editable python --editable sgl-kernel
	@touch $@

# --- run -----------------------------------------------------------------------------------------------------
.PHONY: models
models: env  ## fetch and convert the demo pair (1.5 GB of downloads, 4 GB on disk)
	$(PY) -m sglang_ssd.demo_models

.PHONY: serve
serve: env $(if $(MODEL),,models)  ## serve the demo pair, or MODEL= and DRAFT=, with SSD
	$(PY) -m sglang_ssd.launch_server --model-path '$(or $(MODEL),$(DEMO_TARGET))' \
	    --speculative-draft-model-path '$(or $(DRAFT),$(DEMO_DRAFT))' \
	    --host $(HOST) --port $(PORT) $(if $(filter cpu,$(DEVICE)),--device cpu) $(ARGS)

.PHONY: bench-e2e
bench-e2e: env models  ## measure plain, sync and async on the demo pair: a table and JSON
	$(PY) benchmark/e2e.py $(ARGS)

# --- check ---------------------------------------------------------------------------------------------------
# One thread a process: several busy processes share the cores, and more threads than cores run many times slower.
.PHONY: test
test: env  ## run the tests
	OMP_NUM_THREADS=1 $(PY) -m pytest $(ARGS)

.PHONY: lint
lint: env  ## ruff, check and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

.PHONY: clean
clean:  ## remove .venv and caches; models stay
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
