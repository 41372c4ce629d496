"""specgraph on Ascend NPUs through torch_npu. Importing this package imports nothing of the vendor's."""
