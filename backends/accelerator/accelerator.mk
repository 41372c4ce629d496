# Included by the top-level Makefile. `make test-accelerator` builds the test device, and runs this backend's tests and
# the conformance suite on it, without an accelerator.
ACCELERATOR_DIR := backends/accelerator
ASYNCCPU_BUILD ?= $(abspath $(ACCELERATOR_DIR))/device/build

.PHONY: asynccpu test-accelerator conformance-accelerator
asynccpu: $(VENV)/.dev
	$(MAKE) -C $(ACCELERATOR_DIR)/device PYTHON=$(abspath $(BIN))/python OUT=$(ASYNCCPU_BUILD)

test-accelerator: asynccpu
	cd $(ACCELERATOR_DIR) && ASYNCCPU_BUILD=$(ASYNCCPU_BUILD) OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m pytest -q tests

# The whole suite; several minutes
conformance-accelerator: asynccpu
	ASYNCCPU_BUILD=$(ASYNCCPU_BUILD) PYTHONPATH=$(abspath $(ACCELERATOR_DIR))/device:$(ASYNCCPU_BUILD) \
	  OMP_NUM_THREADS=1 $(BIN)/specgraph conformance accelerator
