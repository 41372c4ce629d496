"""specgraph on Moore Threads GPUs, by way of torch.musa. Importing this imports no vendor library."""
