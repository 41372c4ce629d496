"""Which attention a drafter runs on, by name."""

from __future__ import annotations

from specgraph.attention.interface import AttentionBackend
from specgraph.attention.paged import PagedAttention, PagedHostAttention
from specgraph.errors import ConfigError
from specgraph.platforms import Platform


def choose_attention(name: str, platform: Platform) -> AttentionBackend:
    """Attention by name.

    Args:
        name: "auto": the platform's own, the first that it offers, else "device". "device" and "host": the core's
            paged attention, with lengths from device tensors or from host integers. Or a name that the platform offers.

    Raises:
        ConfigError: there is no attention of that name on this platform.
        UnsupportedError: what it needs is not installed.
    """
    own = platform.attention_backends()
    if name == "auto":
        name = next(iter(own), "device")
    if name in own:
        return own[name](platform)
    if name == "device":
        return PagedAttention()
    if name == "host":
        return PagedHostAttention(platform)
    offered = ", ".join(["auto", "device", "host", *own])
    raise ConfigError(f"no attention '{name}' on platform '{platform.info.name}'; there are {offered}")
