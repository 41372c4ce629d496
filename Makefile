# Two targets matter: `make demo` runs the shipped pair, `make test` is the whole check that CI runs.
PYTHON ?= python3
VENV ?= .venv
# The release that CI uses. Installed first, alone, so that nothing else chooses torch. Override to keep your own.
TORCH ?= torch==2.13.0
# The CPU build, a tenth of the other's size. Where there is none of this name, or no network, plain torch is taken
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := $(VENV)/bin
# Compiling every file of every package takes longer than installing it; Python compiles what is imported
PIP_INSTALL := install --quiet --disable-pip-version-check --no-compile
PIP := $(BIN)/python -m pip $(PIP_INSTALL)
# $(call install,PYTHON,WHAT): uv takes a quarter of pip's time, but reads none of pip's settings: where it fails, pip does it
install = $(BIN)/uv pip install --quiet --python $(1) $(2) || $(BIN)/python -m pip --python $(1) $(PIP_INSTALL) $(2)
# What builds the local parts, installed once: isolated, each of ten parts would install it anew
BUILD_TOOLS := "hatchling>=1.25" "hatch-fancy-pypi-readme>=24" editables
# All local parts go into ONE call: `specgraph` on PyPI is an unrelated package that must never be looked for.
PARTS := . $(wildcard conformance backends/cuda backends/npu backends/musa backends/accelerator integrations/transformers integrations/vllm integrations/sglang drafters/smollm2)
# transformers 5.24, which specgraph-transformers needs, is for Python 3.11 and newer
NOT_HERE := $(shell $(PYTHON) -c "import sys; print('' if sys.version_info >= (3, 11) else 'transformers')")
OTHERS := $(foreach part,$(filter-out . %/$(NOT_HERE),$(PARTS)),$(if $(wildcard $(part)/pyproject.toml),-e ./$(part)))
JOBS ?= 2

.PHONY: demo test lint types unit docs packages installed conformance clean

demo: $(BIN)/specgraph
	$(BIN)/specgraph generate
	@echo "Next: . $(BIN)/activate, then a conversation with a language model: specgraph chat --model smollm2"

test: lint types unit docs packages conformance

# torch and the core: all that the demo needs
$(BIN)/specgraph: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps --retries 0 --extra-index-url $(TORCH_INDEX) "$(TORCH)+cpu" || $(PIP) "$(TORCH)"
	-$(PIP) uv
	$(call install,$(BIN)/python,$(BUILD_TOOLS))
	$(call install,$(BIN)/python,--no-build-isolation -e .)
	touch $@

$(VENV)/.dev: $(BIN)/specgraph $(wildcard conformance/pyproject.toml backends/*/pyproject.toml integrations/*/pyproject.toml drafters/*/pyproject.toml)
	$(call install,$(BIN)/python,--no-build-isolation -e ".[dev]" $(OTHERS))
	touch $@

# What every process imports is compiled once, before several do it at the same time
$(VENV)/.compiled: $(BIN)/specgraph
	$(BIN)/python -c "import torch.testing, specgraph.engine"
	touch $@

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

# worksteal: tests of one file mostly stay together and share what its fixtures made; nobody idles at the end
unit: $(VENV)/.dev $(VENV)/.compiled
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# The site in build/site. Strict: a dead link or anchor is an error. Loads nothing from the network
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Builders take a licence from their part's own folder alone
LICENCES := $(patsubst %,%/LICENSE,$(filter-out .,$(PARTS)))
$(LICENCES): LICENSE
	cp $< $@

# Wheels and source distributions of all parts in build/packages, checked as an index would and for what it would not
packages: $(VENV)/.dev $(LICENCES)
	rm -rf build/packages
	set -e; for part in $(PARTS); do \
	  (cd $$part && $(abspath $(BIN))/python -m hatchling build --directory $(abspath build/packages)); done
	$(BIN)/python -m twine check --strict build/packages/*
	$(BIN)/python tests/check_packages.py build/packages

# Those wheels as a user installs them, in an environment of any Python: make installed PYTHON=python3.13
INSTALLED ?= build/installed
installed: packages
	test -d $(INSTALLED) || $(PYTHON) -m venv $(INSTALLED)
	wheels=`ls build/packages/*.whl | grep -v specgraph_$(or $(NOT_HERE),nothing)` && \
	  $(INSTALLED)/bin/python -m pip install --quiet --no-compile --force-reinstall --no-deps $$wheels && \
	  $(INSTALLED)/bin/python -m pip install --quiet --no-compile $$wheels
	cd build && $(abspath $(INSTALLED))/bin/python ../tests/check_installed.py

conformance: $(VENV)/.dev $(VENV)/.compiled
	mkdir -p build && OMP_NUM_THREADS=1 $(BIN)/specgraph conformance cpu --json build/conformance-cpu.json

# Reports of this commit in conformance/reports, of what runs without a device: the simulators of npu, musa and accelerator
# among them; cuda.json comes from a machine with a GPU. Half an hour of two idle cores
REPORTS := $(CURDIR)/conformance/reports
RUN_NPU = env TORCH_DEVICE_BACKEND_AUTOLOAD=0 $$(cd $(NPU_DIR)/simulator && $(NPU_PYTHON) -c "import ascendsim; \
  print(*(f'{name}={value}' for name, value in ascendsim.environment('$(NPU_BUILD)').items()))") $(NPU_PYTHON)
.PHONY: reports scoreboard
reports: npu-simulator asynccpu
	export OMP_NUM_THREADS=1; $(BIN)/specgraph conformance cpu --json $(REPORTS)/cpu.json && \
	  PYTHONPATH=$(MUSA_DIR)/simulator SPECGRAPH_MUSA_SIMULATOR=cpu \
	    $(BIN)/specgraph conformance musa --json $(REPORTS)/musa.json && \
	  PYTHONPATH=$(abspath $(ACCELERATOR_DIR))/device:$(ASYNCCPU_BUILD) ASYNCCPU_BUILD=$(ASYNCCPU_BUILD) \
	    $(BIN)/specgraph conformance accelerator --json $(REPORTS)/accelerator.json && \
	  $(RUN_NPU) -c "from specgraph.cli import main; main()" conformance npu --json $(REPORTS)/npu.json
	$(MAKE) scoreboard

scoreboard:
	$(BIN)/specgraph conformance verify $(REPORTS)/*.json
	$(BIN)/python -m specgraph_conformance.scoreboard $(REPORTS)/*.json > build/scoreboard.md
	mv build/scoreboard.md docs/conformance/README.md

-include integrations/integrations.mk
-include backends/npu/npu.mk
-include backends/musa/musa.mk
-include backends/accelerator/accelerator.mk

clean:
	rm -rf $(VENV)
