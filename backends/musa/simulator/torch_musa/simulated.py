"""The simulator's own controls, which are no part of torch_musa's API.

The environment variable SPECGRAPH_MUSA_SIMULATED turns defects on from the start: their names, separated by commas. The
name "2.11" simulates that release.
"""

import os
from dataclasses import dataclass


@dataclass
class Defects:
    """Limits and defects of the process. torch_musa 2.7.1 has the ones that are on by default."""

    reset_keeps_pool: bool = True
    """MUSAGraph.reset() does not give the graph's share of the memory pool back."""
    handles_unchecked: bool = True
    """Events accept any object as a stream, and any object as an event."""
    max_live_graphs: int | None = 2048
    """The most instantiated graphs that a process can hold. None for no limit."""
    barrier_baked: bool = True
    """A collective captured twice in one graph works on baked barrier state (seen with toolchain mcc 5.1.0)."""

    replays_once: bool = False
    """From the second replay on, a graph does nothing."""
    random_baked: bool = False
    """Every replay draws the same numbers."""
    pool_overlaps: bool = False
    """A second graph of a pool overwrites the first one's results: modelled as a replay that does nothing."""
    loop_stops_short: bool = False
    """A graph of 64 ops or more loses its last ops: modelled as a replay that does nothing."""


@dataclass
class Machine:
    """The machine that the probe sees."""

    device_count: int = 1
    release: str = "2.7.1"
    """The simulated release of torch_musa: "2.7.1" or "2.11"."""


def as_2_11() -> None:
    """Simulate 2.11 (and 2.9.1.post1) instead of 2.7.1: reset() gives the pool's share back, and the call that ends a
    recording has another name."""
    machine.release, defects.reset_keeps_pool = "2.11", False


class MemoryCorruption(Exception):
    """Raised if a real device would corrupt memory or crash."""


defects = Defects()
machine = Machine()
faults: list[str] = []
"""All corruptions so far. It is needed because Python only prints an exception of a destructor."""


def device_kind() -> str:
    """Return the kind of device, for reports."""
    return "stand-in for torch_musa over the CPU recorder, no Moore Threads device"


def corrupt(what: str) -> None:
    """Add `what` to `faults` and raise MemoryCorruption."""
    faults.append(what)
    raise MemoryCorruption(what)


def restore() -> None:
    """Go back to the state at the start of the process: the defects of 2.7.1 and of the environment variable, one
    device and no faults."""
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
    """Return the input, as a collective over one rank does. Return zeros if the barrier of `slot` is baked."""
    from torch_musa.graphs import captures

    capture = captures.current
    if capture is None:
        return tensor * 1
    again = slot in capture.collectives
    capture.collectives.add(slot)
    return tensor * (0 if again and defects.barrier_baked else 1)


restore()
