"""What graphs hold, apart from what libraries keep for good."""

from __future__ import annotations

import gc

import torch

from torch_musa.forms import form


def reserved(platform) -> int:
    """Bytes that the allocator holds once all that can go is gone."""
    gc.collect()
    platform.synchronize()
    if form.NAME == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # kept by stream
    platform.musa.empty_cache()
    return platform.memory().reserved


def live(platform) -> int:
    """Graph objects of the process."""
    return len(platform.musa.MUSAGraph.get_latest_instance())
