"""The `cpu` platform: recorded graphs on the CPU with a device graph's semantics."""

from specgraph.reference.graph import CpuGraph
from specgraph.reference.platform import CpuPlatform
from specgraph.reference.pool import CpuGraphPool
from specgraph.reference.stream import CpuEvent, CpuStream

__all__ = ["CpuEvent", "CpuGraph", "CpuGraphPool", "CpuPlatform", "CpuStream"]
