"""The fused write to the KV cache against the core's op on the cpu, and what falls back to plain torch ops."""

from __future__ import annotations

import pytest
import torch
from specgraph_npu import kv_cache

from specgraph import ops
from specgraph.device import trial
from specgraph.ops import KVCache, NewRows

ROWS, HEADS, KV_HEADS, DIM, BLOCKS, BLOCK = 7, 4, 2, 32, 4, 16
SLOTS = [17, -1, 33, 16, -1, 63, 40]
FUSED = "aclnnScatterPaKvCache"


@pytest.fixture(autouse=True)
def opened(npu, runtime, all_limits):
    """The op is chosen when a platform's capabilities are probed."""
    assert npu.capabilities.notes["fused KV write"], npu.capabilities.notes["fused KV write"].reason


def operands(dtype: torch.dtype, rotary_dim: int, value_dim: int = DIM) -> list:
    """The arguments of `rotate_and_store`, one tensor after the other, on the host."""
    g = torch.Generator().manual_seed(rotary_dim)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    query, key, value = random(ROWS, HEADS, DIM), random(ROWS, KV_HEADS, DIM), random(ROWS, KV_HEADS, value_dim)
    rotary = torch.randn(50, rotary_dim, generator=g) if rotary_dim else None
    positions = torch.randint(0, 50, (ROWS,), generator=g)
    caches = random(BLOCKS, BLOCK, KV_HEADS, DIM), random(BLOCKS, BLOCK, KV_HEADS, value_dim)
    return [query, key, value, rotary, positions, torch.tensor(SLOTS), *caches]


def store(op, query: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
    """Call the op with the operands."""
    return op(query, NewRows(*rest[:5]), KVCache(*rest[5:]))


def on_npu(host: list) -> list:
    return [each if each is None else each.npu() for each in host]


def calls(runtime) -> int:
    torch.npu.synchronize()
    return runtime.report()["calls"].get(FUSED, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rotary_dim", "value_dim"), [(DIM, DIM), (16, DIM), (0, 48)])
def test_rows_reach_their_slots(runtime, dtype, rotary_dim, value_dim):
    """One fused op in bfloat16 and float16, none in float32; rows with a negative slot write nothing."""
    host = operands(dtype, rotary_dim, value_dim)
    device, before = on_npu(host), calls(runtime)
    rotated = store(ops.rotate_and_store, *device)
    assert calls(runtime) - before == (dtype is not torch.float32)
    expected = store(ops.rotate_and_store.reference, *host)
    assert torch.equal(device[-2].cpu(), host[-2])
    assert torch.equal(device[-1].cpu(), host[-1])
    torch.testing.assert_close(rotated.cpu(), expected)
    assert rotated.data_ptr() != device[0].data_ptr()


def test_values_of_a_joint_projection_and_caches_with_gaps(runtime):
    """Values may be columns of a larger tensor; caches may not, for the fused op."""
    host = operands(torch.bfloat16, 0)
    device = on_npu(host)
    device[2] = torch.cat([device[1], device[2]], dim=-1)[..., DIM:]
    store(ops.rotate_and_store, *device)
    store(ops.rotate_and_store.reference, *host)
    assert torch.equal(device[-1].cpu(), host[-1])
    wide = torch.zeros(BLOCKS, BLOCK, KV_HEADS, 2 * DIM, dtype=torch.bfloat16, device="npu")
    device[-1], before = wide[..., :DIM], calls(runtime)
    store(ops.rotate_and_store, *device)
    assert calls(runtime) == before
    live = [slot for slot in SLOTS if slot >= 0]
    assert torch.equal(wide.cpu().view(-1, KV_HEADS, 2 * DIM)[live][..., :DIM], host[-1].view(-1, KV_HEADS, DIM)[live])


def test_captured_write_follows_its_slots(npu, runtime):
    host = operands(torch.bfloat16, DIM)
    device, graph = on_npu(host), npu.graph()
    with graph.capture():
        store(ops.rotate_and_store, *device)
    for slots in (SLOTS, [5, 4, -1, 3, 2, 1, 60]):
        host[5] = torch.tensor(slots)
        device[5].copy_(host[5])
        graph.replay()
        store(ops.rotate_and_store.reference, *host)
        assert torch.equal(device[-1].cpu(), host[-1])
    graph.close()


@pytest.mark.parametrize("wrong", ["negative", "shifted"])
def test_a_device_that_writes_otherwise_is_found_out(npu, runtime, monkeypatch, wrong):
    """A device whose op writes rows without a slot, or to other slots, keeps the plain torch ops."""
    right = kv_cache.write

    def write(key, value, key_cache, value_cache, slots):
        right(key, value, key_cache, value_cache, slots + 1 if wrong == "shifted" else slots)
        if wrong == "negative":  # a slot of -1 is the last row of the block before the cache
            size = key_cache[0, 0].numel()
            before = torch.as_strided(key_cache, (size,), (1,), key_cache.storage_offset() - size)
            before.copy_(key[slots == -1].flatten())

    monkeypatch.setattr(kv_cache, "write", write)
    support = trial.claim(npu, kv_cache._writes_live_rows_only)
    assert not support
    assert "without a slot was written" in support.reason
