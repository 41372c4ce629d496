# Included by the top-level Makefile. `make test-npu` installs the vendor wheel into an environment of its own, builds
# the simulated runtime and runs the NPU backend's tests through both, without an NPU.
NPU_DIR := backends/npu
NPU_VENV ?= .venv-npu
NPU_PYTHON := $(abspath $(NPU_VENV))/bin/python
NPU_BUILD ?= $(abspath $(NPU_DIR))/simulator/build
NPU_BASE_PYTHON ?= python3
NPU_TORCH ?= 2.13.0
NPU_WHEEL ?= $(NPU_TORCH)

# By the pip of the other environment
NPU_PIP := $(BIN)/python -m pip --python $(NPU_PYTHON)
# Links to the torch of the main environment, where its release and Python are the same: 725 MB to unpack and to compile
$(NPU_VENV)/done: $(NPU_DIR)/pyproject.toml $(NPU_DIR)/npu.mk | $(VENV)/.compiled
	$(NPU_BASE_PYTHON) -m venv --without-pip $(NPU_VENV)
	cd $(NPU_VENV)/lib/python*/site-packages && from=$(abspath $(VENV))/lib/`basename $$(dirname $$PWD)`/site-packages && \
	  test ! -e torch && test -d $$from/torch-$(NPU_TORCH)[+.]* && \
	  cp -al $$from/torch $$from/torchgen $$from/functorch $$from/torch-*.dist-info . || true
	$(NPU_PIP) $(PIP_INSTALL) --no-deps torch==$(NPU_TORCH) torch_npu==$(NPU_WHEEL)
	$(call install,$(NPU_PYTHON),torch==$(NPU_TORCH) numpy pyyaml pytest pytest-xdist hypothesis pluggy safetensors tokenizers typer \
	  rich $(BUILD_TOOLS))
	$(call install,$(NPU_PYTHON),--no-build-isolation --no-deps -e . -e ./models -e ./run -e ./conformance -e $(NPU_DIR))
	touch $@

.PHONY: npu-simulator test-npu
npu-simulator: $(NPU_VENV)/done
	$(MAKE) -C $(NPU_DIR)/simulator -j2 PYTHON=$(NPU_PYTHON) OUT=$(NPU_BUILD)

# All tests run in one way; those that depend on how events are built and ops are queued run in the three other ways
# too, except the tests marked `once`. Each way is one process: what it imports costs more than a second one would gain.
NPU_WAYS := values-1 values-0 events-1 events-0
NPU_PYTEST = ASCENDSIM_BUILD=$(NPU_BUILD) ASCENDSIM_WHEELS=$(NPU_WHEELS) OMP_NUM_THREADS=1 \
  TORCH_DEVICE_BACKEND_AUTOLOAD=0 ASCENDSIM_FLAVOUR=$(subst -, TASK_QUEUE_ENABLE=,$*) $(NPU_PYTHON) -m pytest -q
NPU_PROTOCOL := $(addprefix $(NPU_DIR)/tests/test_,\
  drafting.py drafter_kinds.py accounting.py broken_protocols.py simulator_capture.py leaks.py limits.py \
  random_graphs.py two_platforms.py)
.PHONY: $(NPU_WAYS:%=test-npu-%)
test-npu: $(NPU_WAYS:%=test-npu-%)
$(NPU_WAYS:%=test-npu-%): test-npu-%: npu-simulator npu-wheels
	$(NPU_PYTEST) $(if $(filter values-1,$*),$(NPU_DIR)/tests,-m 'not once' $(NPU_PROTOCOL))

# All tests in each of the four ways: for whoever changes this backend
.PHONY: test-npu-all-ways $(NPU_WAYS:%=all-npu-%)
test-npu-all-ways: $(NPU_WAYS:%=all-npu-%)
$(NPU_WAYS:%=all-npu-%): all-npu-%: npu-simulator npu-wheels
	$(NPU_PYTEST) $(NPU_DIR)/tests

# The published wheels that the backend claims, to be read, not installed
NPU_WHEELS ?= $(abspath $(NPU_VENV))/wheels
.PHONY: npu-wheels
npu-wheels: $(NPU_VENV)/done
	for version in 2.10.0.post4 2.12.0.post3 2.13.0 2.14.0; do \
	  $(NPU_PIP) download -q --no-deps -d $(NPU_WHEELS) torch_npu==$$version || exit 1; done

# The unmodified wheels of vLLM and vllm-ascend on the simulated runtime. About 5 GB of wheels and two minutes of two idle
# cores: for whoever changes the simulator or that plugin, not a part of .ci/run
NPU_ENGINE := $(NPU_DIR)/engine
NPU_ENGINE_VENV ?= .venv-npu-engine
NPU_ENGINE_PYTHON := $(abspath $(NPU_ENGINE_VENV))/bin/python
NPU_ENGINE_BUILD ?= $(abspath $(NPU_DIR))/simulator/build/engine
$(NPU_ENGINE_VENV)/done: $(NPU_ENGINE)/overrides.txt
	$(NPU_BASE_PYTHON) -m venv $(NPU_ENGINE_VENV)
	$(NPU_ENGINE_PYTHON) -m pip install -q uv
	$(NPU_ENGINE_VENV)/bin/uv pip install --python $(NPU_ENGINE_PYTHON) --override $(NPU_ENGINE)/overrides.txt \
	  torch==2.10.0 torch_npu==2.10.0.post4 vllm==0.23.0 vllm-ascend==0.23.0 pytest setuptools
	touch $@

.PHONY: npu-engine test-npu-engine
npu-engine: $(NPU_ENGINE_VENV)/done
	$(MAKE) -C $(NPU_DIR)/simulator -j2 PYTHON=$(NPU_ENGINE_PYTHON) OUT=$(NPU_ENGINE_BUILD)
test-npu-engine: npu-engine
	cd $(NPU_ENGINE) && ASCENDSIM_BUILD=$(NPU_ENGINE_BUILD) TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(NPU_ENGINE_PYTHON) -m pytest -q .
