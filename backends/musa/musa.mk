# Included by the top-level Makefile. `make test-musa` runs the MUSA backend's tests on the simulated torch_musa over
# recorded graphs on the CPU, without a Moore Threads device and without torch_musa: all of them as torch_musa 2.7.1,
# and those of graphs, pools and vLLM's plugin as 2.11 with torchada, which every engine on MUSA loads.
MUSA_DIR := backends/musa
MUSA_PYTEST = SPECGRAPH_MUSA_SIMULATOR=cpu OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m pytest -q
TORCHADA := $(abspath build/torchada)
WITH_TORCHADA = PYTHONPATH=$(TORCHADA):$(abspath $(MUSA_DIR))/simulator $(MUSA_PYTEST) -p torch_musa -p torchada -W ignore

.PHONY: test-musa test-musa-torchada test-triton-3.2
test-musa: $(VENV)/.dev $(TORCHADA)
	cd $(MUSA_DIR) && $(MUSA_PYTEST) tests
	cd $(MUSA_DIR) && SPECGRAPH_MUSA_SIMULATED=2.11 $(WITH_TORCHADA) \
	  tests/test_capture.py tests/test_pools.py tests/test_torchada.py tests/test_vllm.py -k "not mtp and not dspark"

$(TORCHADA): $(BIN)/specgraph
	$(PIP) --no-deps --target $@ torchada==0.1.103
	touch $@

# The tests of vLLM's plugin with torchada loaded: not in CI, three minutes of one core
test-musa-torchada: $(VENV)/.dev $(TORCHADA)
	$(WITH_TORCHADA) integrations/vllm/tests

# Every Triton kernel compiles, down to a binary, with the Triton that vllm-musa pins: upstream's, for an NVIDIA target,
# which need not be there. A job of its own in .github/workflows: 700 MB, seven minutes of one core
TRITON_3_2 := $(abspath build/triton-3.2.0)
test-triton-3.2: $(VENV)/.dev $(TRITON_3_2)
	cd backends/cuda && PYTHONPATH=$(TRITON_3_2) TRITON_CACHE_DIR=$(TRITON_3_2).cache OMP_NUM_THREADS=1 \
	  $(abspath $(BIN))/python -m pytest -q -rs tests/test_compile.py -k "sm_80 or sm_90"

$(TRITON_3_2): $(BIN)/specgraph
	$(PIP) --no-deps --target $@ triton==3.2.0
	touch $@
