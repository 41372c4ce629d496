"""Draft speculative tokens through device graphs, on any accelerator."""
