"""Names of torch_musa that this package calls, and the form of each call.

The probe compares this table with the installed torch_musa before anything runs on the device. Sources: torch_musa
2.7.1, 2.9.1.post1 and 2.11.0.post2, as `backends/musa/api/` records them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

_TABLE = """
    Event(enable_timing=) Event.elapsed_time(self,event) Event.query(self) Event.record(self,stream)
    Event.synchronize(self) Event.wait(self,stream) MUSAGraph() MUSAGraph.capture_begin(self,pool,capture_error_mode=)
    MUSAGraph.capture_end(self) MUSAGraph.get_latest_instance() MUSAGraph.replay(self) MUSAGraph.reset(self)
    Stream(device) Stream.device_index Stream.device_type Stream.query(self) Stream.record_event(self,event)
    Stream.stream_id Stream.synchronize(self) Stream.wait_event(self,event) Stream.wait_stream(self,stream)
    current_stream(device) device(device) device_count() empty_cache() get_device_properties(device)
    get_rng_state(device) graph_pool_handle() is_available() is_current_stream_capturing() mem_get_info(device)
    memory_allocated(device) memory_reserved(device) set_rng_state(state,device) stream(stream) synchronize(device)
"""

CALLS: Mapping[str, tuple[str, ...] | None] = {
    name: tuple(filter(None, arguments.split(","))) if bracket else None
    for name, bracket, arguments in (entry.rstrip(")").partition("(") for entry in _TABLE.split())
}
"""Name below `torch.musa` -> the arguments passed: `word` is positional, `word=` a keyword. None: a property."""


def missing_names(musa: Any) -> list[str]:
    """What of `CALLS` the module `musa` lacks: names it does not have, and calls that its signatures refuse.

    Signatures that Python can't read (functions of a binary module) are taken to fit.
    """
    return [name + wrong for name in CALLS if (wrong := _mismatch(musa, name)) is not None]


def _mismatch(musa: Any, name: str) -> str | None:
    """What to append to `name` in the list of missing names; None if it fits."""
    try:
        found = attrgetter(name)(musa)
    except AttributeError:
        return ""
    if (arguments := CALLS[name]) is None:
        return None
    if inspect.isclass(found):
        found = found.__init__ if found.__new__ is object.__new__ else found.__new__
        arguments = ("self", *arguments)
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*(a for a in arguments if a[-1] != "="), **{a[:-1]: None for a in arguments if a[-1] == "="})
    except TypeError:
        return f"({', '.join(a for a in arguments if a != 'self')}), which is {signature} here"
    return None
