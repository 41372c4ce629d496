"""specgraph on NVIDIA GPUs, by way of torch.cuda. Importing this imports no vendor library."""
