"""specgraph on NVIDIA GPUs, through torch.cuda. Importing this package imports no vendor library."""
