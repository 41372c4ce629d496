"""specgraph on any device with graphs in torch.accelerator. Importing this package touches no device."""
