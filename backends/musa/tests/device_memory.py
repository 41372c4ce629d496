"""Memory and graph objects that are in use, without what libraries never free."""

from __future__ import annotations

import gc


def reserved(platform) -> int:
    """Bytes that the allocator holds after everything unused was freed."""
    gc.collect()
    platform.synchronize()
    platform.musa.empty_cache()
    return platform.memory().reserved


def live(platform) -> int:
    """Number of MUSAGraph objects in the process."""
    return len(platform.musa.MUSAGraph.get_latest_instance())
