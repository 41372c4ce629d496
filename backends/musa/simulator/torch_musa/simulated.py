"""The simulator's own controls, which are no part of torch_musa's API.

The environment variable SPECGRAPH_MUSA_SIMULATED=2.11 simulates that release from the start.
"""

import os
from dataclasses import dataclass

DEVICE_KIND = "stand-in for torch_musa over the CPU recorder, no Moore Threads device"
"""The kind of device in reports."""


@dataclass
class Machine:
    """The simulated machine."""

    device_count: int = 1
    release: str = "2.7.1"
    """The release of torch_musa: "2.7.1", or "2.11" for what newer releases do otherwise."""
    max_live_graphs: int | None = 2043
    """The most executables of a process, as torchada 0.1.103 measured it (_graph_rotation.py). None for no limit."""
    record_stream_reuse: bool = False
    """The allocator's option graph_capture_record_stream_reuse is on (e205050, csrc/core/MUSACachingAllocator.cpp)."""
    captures_nothing: bool = False
    """The runtime gives no graph at the end of a capture (new MUSAGraph.cpp, "Invalid capture.")."""


class MemoryCorruption(Exception):
    """Raised if a real device would corrupt memory or crash."""


machine = Machine()
faults: list[str] = []
"""All corruptions so far. It is needed because Python only prints an exception of a destructor."""


def corrupt(what: str) -> None:
    """Add `what` to `faults` and raise MemoryCorruption."""
    faults.append(what)
    raise MemoryCorruption(what)


def restore() -> None:
    """Go back to the state at the start of the process."""
    for name, value in vars(Machine()).items():
        setattr(machine, name, value)
    machine.release = os.environ.get("SPECGRAPH_MUSA_SIMULATED", "2.7.1")
    faults.clear()


restore()
