"""specgraph on Ascend NPUs, through torch_npu. Importing this package imports no vendor library."""
