"""Only torch.musa's own handles reach torch.musa."""

from __future__ import annotations

import pytest
import torch
from specgraph.errors import PlatformError

from torch_musa import simulated


def generic_stream() -> torch.Stream:
    return torch.Stream(device="cpu")


def test_a_generic_stream_handed_to_a_musa_event_is_refused(musa):
    for call in (musa.event().record, musa.event().wait):
        with pytest.raises(PlatformError, match="cast it unchecked"):
            call(generic_stream())
    assert simulated.faults == []


def test_the_vendor_s_event_takes_it(musa):
    """The vendor's own event takes a torch.Stream: the memory corruption that the check prevents."""
    with pytest.raises(simulated.MemoryCorruption):
        musa.musa.Event().record(generic_stream())
    simulated.faults.clear()


def test_the_check_covers_every_way_in(musa):
    generic, stream = generic_stream(), musa.stream()
    with pytest.raises(PlatformError, match="no stream"):
        musa.use(generic)
    with pytest.raises(PlatformError, match="no stream"):
        stream.wait_stream(generic)
    with pytest.raises(PlatformError, match="no event"):
        stream.wait_event(object())
    with pytest.raises(PlatformError, match="no event"):
        stream.record_event(object())
    with pytest.raises(PlatformError, match="cast it unchecked"):
        stream.record_event().record(generic)
    with pytest.raises(PlatformError, match="cast it unchecked"):
        musa.current_stream().record_event().wait(generic)
    with pytest.raises(PlatformError, match="no event"):
        musa.event(timing=True).elapsed_time(object())
    assert simulated.faults == []


def test_the_vendor_s_own_handles_are_welcome(musa):
    stream, event = musa.musa.Stream(), musa.musa.Event()
    with musa.use(stream):
        assert musa.current_stream() == stream
        x = torch.ones(3, device=musa.device) * 2
    musa.event().record(stream)
    musa.stream().record_event(event)
    musa.current_stream().wait_stream(stream)
    musa.current_stream().wait_event(event)
    musa.synchronize()
    assert x.tolist() == [2.0] * 3
