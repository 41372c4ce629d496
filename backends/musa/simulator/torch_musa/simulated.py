"""The simulator's own controls. No part of torch_musa's API.

SPECGRAPH_MUSA_SIMULATED names defects, separated by commas, that are on from the start: for processes that a test
starts.
"""

import os
from dataclasses import dataclass


@dataclass
class Defects:
    """Limits and defects, as the process-wide runtime has them. The first group is what torch_musa 2.7.1 does."""

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
    """A further graph of a pool writes over what the graphs before left there: modelled as doing nothing."""
    loop_stops_short: bool = False
    """A graph of many ops loses its last ones: modelled as doing nothing when it was captured with `merged`-like
    length (64 ops or more, on the cpu form)."""
    loop_faults: bool = False
    """Such a graph ends the process at its replay, as a device fault does."""


@dataclass
class Machine:
    """What the probe finds."""

    device_count: int = 1
    release: str = "2.7.1"
    """Of torch_musa: "2.7.1" or "2.11"."""


def as_2_11() -> None:
    """What torch_musa 2.9.1.post1 and 2.11 do otherwise than 2.7.1: reset() gives the pool back, and the call that ends
    a recording has another name."""
    machine.release, defects.reset_keeps_pool = "2.11", False


class MemoryCorruption(Exception):
    """What would corrupt memory or crash on a device, and here is only told."""


defects = Defects()
machine = Machine()
faults: list[str] = []
"""Every corruption so far, also those in destructors, whose exceptions nobody sees."""


def device_kind() -> str:
    """What reports call this device."""
    from torch_musa.forms import form

    return f"stand-in for torch_musa over {form.WHAT}, no Moore Threads device"


def corrupt(what: str) -> None:
    """Report it."""
    faults.append(what)
    raise MemoryCorruption(what)


def restore() -> None:
    """The defects of 2.7.1 and those that the environment names, one device, nothing reported."""
    for state in (defects, machine):
        for name, value in vars(type(state)()).items():
            setattr(state, name, value)
    for name in filter(None, os.environ.get("SPECGRAPH_MUSA_SIMULATED", "").split(",")):
        setattr(defects, name, True)
    faults.clear()


def all_reduce(tensor, slot):
    """A collective over one rank: what comes out is what went in, unless the barrier of `slot` is baked."""
    from torch_musa.graphs import captures

    capture = captures.current
    if capture is None:
        return tensor * 1
    again = slot in capture.collectives
    capture.collectives.add(slot)
    return tensor * (0 if again and defects.barrier_baked else 1)


restore()
