# Included by the top-level Makefile. `make test-musa` runs the MUSA backend's tests on the simulated torch_musa over
# recorded graphs on the CPU, without a Moore Threads device and without torch_musa: all of them as torch_musa 2.7.1, and
# those of graphs and pools as 2.11 too.
MUSA_DIR := backends/musa

.PHONY: test-musa
test-musa: $(VENV)/.dev
	cd $(MUSA_DIR) && SPECGRAPH_MUSA_SIMULATOR=cpu OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m pytest -q tests
	cd $(MUSA_DIR) && SPECGRAPH_MUSA_SIMULATOR=cpu SPECGRAPH_MUSA_SIMULATED=2.11 OMP_NUM_THREADS=1 \
	  $(abspath $(BIN))/python -m pytest -q tests/test_capture.py tests/test_pools.py tests/test_budget.py
