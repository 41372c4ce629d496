"""specgraph on any device that registers graphs with torch.accelerator. Importing this touches no device."""
