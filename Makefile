# Two targets matter: `make demo` runs the shipped pair, `make test` is the whole check that CI runs.
PYTHON ?= python3
VENV ?= .venv
# The release that CI uses. Installed first, alone, so that nothing else chooses torch: every later install is held to it.
# Override to have another.
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
PARTS := . models run $(wildcard conformance backends/cuda backends/npu backends/musa backends/accelerator integrations/plugin integrations/transformers integrations/vllm integrations/vllm_ascend integrations/sglang drafters/smollm2)
# $(FITTING) FOLDER...: those parts that this Python and torch can have, and a line for each other. It fails where torch is
# not the one that was asked for
FITTING = $(BIN)/python tests/fitting_parts.py --torch "$(TORCH)"
# What is installed behind torch may not bring another
HELD = --constraint $(VENV)/torch.txt
JOBS ?= 2

.PHONY: demo test lint types unit docs packages installed conformance clean

# With a temperature: greedy text of so small a model soon repeats one line, which makes it too easy to draft
demo: $(BIN)/specgraph
	$(BIN)/specgraph generate --temperature 0.45 --seed 0 --max-tokens 120
	@echo "Next: . $(BIN)/activate, then a conversation with a language model: specgraph chat --model smollm2"

test: lint types unit docs packages conformance

# torch, the core, models and the decoder: all that the demo needs
$(BIN)/specgraph: pyproject.toml models/pyproject.toml run/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	-$(PIP) uv
	$(PIP) --no-deps --retries 0 --extra-index-url $(TORCH_INDEX) "$(TORCH)+cpu" || { $(call install,$(BIN)/python,"$(TORCH)"); }
	$(BIN)/python -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" > $(VENV)/torch.txt
	$(call install,$(BIN)/python,$(BUILD_TOOLS))
	$(call install,$(BIN)/python,$(HELD) --no-build-isolation -e . -e ./models -e ./run)
	touch $@

$(VENV)/.dev: $(BIN)/specgraph $(wildcard conformance/pyproject.toml backends/*/pyproject.toml integrations/*/pyproject.toml drafters/*/pyproject.toml)
	set -e; parts=`$(FITTING) $(filter-out .,$(PARTS))`; parts=`printf -- '-e ./%s ' $$parts`; \
	  $(call install,$(BIN)/python,$(HELD) --no-build-isolation -e ".[dev]" $$parts)
	touch $@

# What every process imports is compiled once, before several do it at the same time
$(VENV)/.compiled: $(BIN)/specgraph
	$(BIN)/python -c "import torch.testing, specgraph_run.text"
	touch $@

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

# worksteal: tests of one file mostly stay together and share what its fixtures made; nobody idles at the end
unit: $(VENV)/.dev $(VENV)/.compiled
	set -e; cuda=`$(FITTING) backends/cuda`; \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests $${cuda:+$$cuda/tests}

# Tests of what depends on the interpreter (streams, contexts, dataclasses, annotations, options), on the other Pythons that
# we name, each in an environment of its own. `make test PYTHON=python3.12 VENV=.venv-3.12` runs everything on one
PYTHONS ?= 3.10 3.12 3.13
ON_EACH := tests/test_imports.py tests/test_validation.py tests/cli tests/device tests/draft \
  $(patsubst %,tests/decoder/test_%.py,interrupts stream text text_stream chat_template harmony request greedy metrics)
.PHONY: test-pythons $(PYTHONS:%=test-python-%)
test-pythons: $(PYTHONS:%=test-python-%)
$(PYTHONS:%=test-python-%): test-python-%:
	@python=`python$* -c "import sys; print(sys.executable)" 2>/dev/null || PYENV_VERSION=$* pyenv which python 2>/dev/null`; \
	if test -n "$$python"; then \
	  $(MAKE) unit-of-python PYTHON=$$python VENV=.venv-$*; \
	else echo "Python $* is left out: there is no python$*, and pyenv has none"; test "$$CI" != true; fi

.PHONY: unit-of-python
unit-of-python: $(VENV)/.dev $(VENV)/.compiled
	$(FITTING)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" $(ON_EACH)

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
	python=`$(INSTALLED)/bin/python -c "import platform; print(platform.python_version())"` && \
	  wheels=`$(BIN)/python tests/fitting_parts.py --python $$python --wheels build/packages $(PARTS)` && \
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
	  $(RUN_NPU) -c "from specgraph_run.cli import main; main()" conformance npu --json $(REPORTS)/npu.json
	$(MAKE) scoreboard

scoreboard:
	$(BIN)/specgraph conformance verify $(REPORTS)/*.json
	$(BIN)/python -m specgraph_conformance.scoreboard $(REPORTS)/*.json > build/scoreboard.md
	mv build/scoreboard.md docs/conformance/README.md

-include integrations/integrations.mk
-include backends/npu/npu.mk
-include integrations/vllm_ascend/vllm_ascend.mk
-include backends/musa/musa.mk
-include backends/accelerator/accelerator.mk

clean:
	rm -rf $(VENV)
