# Included by the top-level Makefile. `make test-vllm-ascend` runs vLLM and vllm-ascend themselves with the plugin, on the
# simulated Ascend runtime, without an NPU: about 5 GB of wheels and 15 minutes of two cores. CI does not run it.
VLLM_ASCEND_DIR := integrations/vllm_ascend
VLLM_ASCEND_VENV ?= .venv-vllm-ascend
VLLM_ASCEND_BASE_PYTHON ?= python3.11
VLLM_ASCEND_PYTHON := $(abspath $(VLLM_ASCEND_VENV))/bin/python
VLLM_ASCEND_BUILD ?= $(abspath $(NPU_DIR))/simulator/build/vllm-ascend
VLLM_ASCEND_MODELS ?= $(abspath build)/vllm-ascend-models

# The wheels pin torchvision, triton-ascend and others that their imports do not need here; requirements.txt has what they do
$(VLLM_ASCEND_VENV)/done: $(VLLM_ASCEND_DIR)/engine/requirements.txt $(VLLM_ASCEND_DIR)/vllm_ascend.mk | $(VENV)/.compiled
	$(VLLM_ASCEND_BASE_PYTHON) -m venv --without-pip $(VLLM_ASCEND_VENV)
	$(call install,$(VLLM_ASCEND_PYTHON),--no-deps -r $(VLLM_ASCEND_DIR)/engine/requirements.txt)
	$(call install,$(VLLM_ASCEND_PYTHON),$(BUILD_TOOLS))
	$(call install,$(VLLM_ASCEND_PYTHON),--no-build-isolation --no-deps -e . -e ./models -e ./run -e ./conformance \
	  -e integrations/plugin -e $(NPU_DIR) -e $(VLLM_ASCEND_DIR))
	touch $@

$(VLLM_ASCEND_MODELS)/eagle: $(VLLM_ASCEND_DIR)/engine/models.py | $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python $< $(VLLM_ASCEND_MODELS)

.PHONY: test-vllm-ascend
test-vllm-ascend: $(VLLM_ASCEND_VENV)/done $(VLLM_ASCEND_MODELS)/eagle
	$(MAKE) -C $(NPU_DIR)/simulator -j2 PYTHON=$(VLLM_ASCEND_PYTHON) OUT=$(VLLM_ASCEND_BUILD)
	VLLM_ASCEND_PYTHON=$(VLLM_ASCEND_PYTHON) ASCENDSIM_BUILD=$(VLLM_ASCEND_BUILD) VLLM_ASCEND_MODELS=$(VLLM_ASCEND_MODELS) \
	  $(BIN)/python -m pytest -q $(VLLM_ASCEND_DIR)/engine
