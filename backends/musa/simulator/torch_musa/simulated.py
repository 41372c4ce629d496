"""The simulator's own controls. No part of torch_musa's API.

SPECGRAPH_MUSA_SIMULATED lists what is on from the start, separated by commas: names of defects, or "2.11" for that
release.
"""

import os
from dataclasses import dataclass


@dataclass
class Defects:
    """Limits and defects of the process. The first group is what torch_musa 2.7.1 does."""

    reset_keeps_pool: bool = True
    """MUSAGraph.reset() does not give its share of the memory pool back."""
    handles_unchecked: bool = True
    """Events take any object for a stream, and any object for an event."""
    max_live_graphs: int | None = 2048
    """Instantiated graphs that a process can hold."""
    barrier_baked: bool = True
    """A collective captured twice in one graph finds its barrier state baked (seen with toolchain mcc 5.1.0)."""

    replays_once: bool = False
    """From the second replay on, a graph does nothing."""
    random_baked: bool = False
    """Every replay draws the same numbers."""
    pool_overlaps: bool = False
    """A second graph of a pool overwrites the first one's results: modelled as a replay that does nothing."""
    loop_stops_short: bool = False
    """A graph of 64 ops or more loses its last ones: modelled as a replay that does nothing."""


@dataclass
class Machine:
    """The machine that the probe sees."""

    device_count: int = 1
    release: str = "2.7.1"
    """The simulated release of torch_musa: "2.7.1" or "2.11"."""


def as_2_11() -> None:
    """Simulate 2.11 (and 2.9.1.post1) instead of 2.7.1: reset() gives the pool back, and the call that ends a recording
    has another name."""
    machine.release, defects.reset_keeps_pool = "2.11", False


class MemoryCorruption(Exception):
    """Raised where a real device would corrupt memory or crash."""


defects = Defects()
machine = Machine()
faults: list[str] = []
"""Every corruption so far. Those in destructors raise exceptions that Python only prints."""


def device_kind() -> str:
    """The kind of device that reports name."""
    return "stand-in for torch_musa over the CPU recorder, no Moore Threads device"


def corrupt(what: str) -> None:
    """Add `what` to `faults` and raise MemoryCorruption."""
    faults.append(what)
    raise MemoryCorruption(what)


def restore() -> None:
    """The state at the start of the process: defects of 2.7.1, what the environment lists, one device, no faults."""
    for state in (defects, machine):
        for name, value in vars(type(state)()).items():
            setattr(state, name, value)
    for name in filter(None, os.environ.get("SPECGRAPH_MUSA_SIMULATED", "").split(",")):
        if name == "2.11":
            as_2_11()
        else:
            setattr(defects, name, True)
    faults.clear()


def all_reduce(tensor, slot):
    """A collective over one rank: returns its input, or zeros where the barrier of `slot` is baked."""
    from torch_musa.graphs import captures

    capture = captures.current
    if capture is None:
        return tensor * 1
    again = slot in capture.collectives
    capture.collectives.add(slot)
    return tensor * (0 if again and defects.barrier_baked else 1)


restore()
