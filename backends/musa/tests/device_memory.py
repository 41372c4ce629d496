"""Memory and executable graphs that are in use, without what libraries never free."""

from __future__ import annotations

import gc

from specgraph_musa.graph import holds_capture


def reserved(platform) -> int:
    """Bytes that the allocator holds after everything unused was freed."""
    gc.collect()
    platform.synchronize()
    platform.musa.empty_cache()
    return platform.memory().reserved


def live(platform) -> int:
    """Number of executable graphs in the process."""
    return sum(map(holds_capture, platform.musa.MUSAGraph.get_latest_instance()))
