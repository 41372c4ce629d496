# Included by the top-level Makefile. `make test-musa` runs the MUSA backend's tests on the simulated torch_musa over
# recorded graphs on the CPU: no Moore Threads device, and no torch_musa, takes part.
MUSA_DIR := backends/musa

.PHONY: test-musa
test-musa: $(VENV)/.dev
	cd $(MUSA_DIR) && SPECGRAPH_MUSA_SIMULATOR=cpu OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m pytest -q tests
