"""specgraph on Moore Threads GPUs, through torch.musa. Importing this package imports no vendor library."""
