"""The draft ops of this device: the shared Triton kernels, with this GPU's tiles and launch options."""

from __future__ import annotations

import torch

from specgraph.kernels.triton.implement import register
from specgraph.kernels.triton.launch import LaunchOptions
from specgraph_cuda.overlap import overlap_previous
from specgraph_cuda.tiles import tile_for


def register_kernels(device: torch.device) -> None:
    """Once a process and dispatch key; later calls change nothing."""
    properties = torch.cuda.get_device_properties(device)
    overlap = properties.major >= 9  # see overlap.py
    options = LaunchOptions(
        overlap=overlap_previous if overlap else None,
        extra={"launch_pdl": True} if overlap else {},
        tile=tile_for,
        compute_units=properties.multi_processor_count,
        keep_compiled=True,
    )
    register("CUDA", options)
