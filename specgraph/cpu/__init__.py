"""The `cpu` platform: a recorder of graphs that run on the CPU, and checks that devices do not make.

The recorder (this folder) captures the ops that a thread dispatches and replays them at the captured addresses, in
memory of a pool of its own, as a device graph does. The checks (`checks/`) find the faults that make a device compute
wrong results without an error: unordered streams, inputs that were freed or moved, host reads in a capture.
"""

from specgraph.cpu.graph import CpuGraph
from specgraph.cpu.platform import CpuPlatform

__all__ = ["CpuGraph", "CpuPlatform"]
