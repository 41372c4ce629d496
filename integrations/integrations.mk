# Included by the top-level Makefile. `make test-integrations` runs what needs no GPU: each integration in the engine's own
# Python package, where that is installed, and on the CPU.
.PHONY: test-integrations
test-integrations: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q integrations
