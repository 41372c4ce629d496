"""The device itself: its streams run apart from the host and from each other, and its memory is safe in stream order.
`held()` makes a stream stand still, so that no test depends on how long something takes."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

from torch_asynccpu import held

SIZE = 4096


def test_torch_finds_it() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("asynccpu")
    assert torch.accelerator.device_count() == 2
    assert torch.zeros(3, device="asynccpu:1").device == torch.device("asynccpu", 1)


def test_the_host_goes_on_while_a_stream_stands_still(device: torch.device) -> None:
    x = torch.zeros(SIZE, device=device)
    torch.accelerator.synchronize()
    stream = torch.accelerator.current_stream()
    with held():
        for _ in range(10):
            x.add_(1)
        assert not stream.query()
        event = stream.record_event()
        assert not event.query()
    stream.synchronize()
    assert event.query()
    assert x.cpu().unique().tolist() == [10.0]


def test_another_stream_goes_on_while_one_stands_still(device: torch.device) -> None:
    x, y = torch.zeros(SIZE, device=device), torch.zeros(SIZE, device=device)
    torch.accelerator.synchronize()
    side = torch.Stream(device)
    with held():
        x.add_(1)
        with side:
            y.add_(1)
            assert y.cpu().unique().tolist() == [1.0]
        assert not torch.accelerator.current_stream().query()
    torch.accelerator.synchronize()
    assert x.cpu().unique().tolist() == [1.0]


def test_a_wait_holds_the_other_stream(device: torch.device) -> None:
    x, y = torch.zeros(SIZE, device=device), torch.zeros(SIZE, device=device)
    torch.accelerator.synchronize()
    side = torch.Stream(device)
    with held():
        x.fill_(3)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y.copy_(x)
        assert not side.query()
    side.synchronize()
    assert y.cpu().unique().tolist() == [3.0]


def test_a_copy_from_pinned_memory_waits_its_turn_and_from_pageable_memory_is_taken_at_once(
    device: torch.device,
) -> None:
    x, y = torch.zeros(SIZE, device=device), torch.zeros(SIZE, device=device)
    torch.accelerator.synchronize()
    pinned, pageable = torch.ones(SIZE).pin_memory(), torch.ones(SIZE)
    assert pinned.is_pinned()
    assert not pageable.is_pinned()
    with held():
        x.copy_(pinned, non_blocking=True)
        y.copy_(pageable, non_blocking=True)
        pinned.fill_(5)
        pageable.fill_(5)
    assert x.cpu().unique().tolist() == [5.0]
    assert y.cpu().unique().tolist() == [1.0]


def test_dropped_memory_is_reused_on_its_own_stream_only(device: torch.device) -> None:
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    side = torch.Stream(device)
    x = torch.empty(SIZE, device=device)
    address = x.data_ptr()
    del x
    with side:
        y = torch.empty(SIZE, device=device)
        assert y.data_ptr() != address
    z = torch.empty(SIZE, device=device)
    assert z.data_ptr() == address


def test_memory_that_another_stream_uses_is_not_reused_before_that_stream_is_done(device: torch.device) -> None:
    side = torch.Stream(device)
    x, seen = torch.full((SIZE,), 7.0, device=device), torch.zeros(SIZE, device=device)
    torch.accelerator.synchronize()
    address = x.data_ptr()
    with contextlib.ExitStack() as gate:
        with side:
            gate.enter_context(held())
            seen.copy_(x)
        x.record_stream(side)
        del x
        during = [torch.zeros(SIZE, device=device) for _ in range(4)]
        assert address not in {t.data_ptr() for t in during}
    torch.accelerator.synchronize()
    assert seen.cpu().unique().tolist() == [7.0]
    torch.empty(1, device=device)  # dropped blocks are looked at when memory is asked for
    torch.accelerator.synchronize()
    after = [torch.zeros(SIZE, device=device) for _ in range(4)]
    assert address in {t.data_ptr() for t in after}


def test_an_error_on_the_device_comes_out_at_the_next_wait_and_once(device: torch.device) -> None:
    x, bad = torch.zeros(4, device=device), torch.tensor([9], device=device)
    seen = torch.zeros(1, device=device)
    torch.accelerator.synchronize()
    torch.index_select(x, 0, bad, out=seen)
    with pytest.raises(RuntimeError, match=r"failed on the device, after it was issued: .*out of range"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    assert (x + 1).cpu().tolist() == [1.0] * 4


def test_a_wrong_shape_is_an_error_at_the_call(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.zeros(2, 3, device=device) @ torch.zeros(2, 3, device=device)


def test_figures_of_memory_come_back_to_where_they_were(device: torch.device) -> None:
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    x = torch.zeros(1 << 20, device=device)
    assert torch.accelerator.memory_allocated() >= before[0] + (4 << 20)
    assert torch.accelerator.memory_stats()["active_bytes.all.current"] >= before[0] + (4 << 20)
    del x
    assert torch.accelerator.memory_stats()["active_bytes.all.current"] == before[0]
    assert torch.accelerator.memory_allocated() == before[0]
    assert torch.accelerator.memory_reserved() >= before[1] + (4 << 20)
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == before[1]


def test_devices_do_not_mix(device: torch.device) -> None:
    x, y = torch.ones(4, device="asynccpu:0"), torch.ones(4, device="asynccpu:1")
    with pytest.raises(RuntimeError, match="device"):
        x + y
    assert (x + y.to(device)).cpu().tolist() == [2.0] * 4


def test_a_copy_that_owns_the_last_of_a_tensor_does_not_need_pythons_lock_on_the_device(device: torch.device) -> None:
    """empty_cache() waits for the streams with Python's lock held; it hung where a stream dropped the tensor."""
    x = torch.zeros(1 << 16, device=device)
    for i in range(100):
        x.copy_(torch.full((1 << 16,), float(i)).pin_memory(), non_blocking=True)
        torch.accelerator.empty_cache()
    assert x.cpu().unique().tolist() == [99.0]
