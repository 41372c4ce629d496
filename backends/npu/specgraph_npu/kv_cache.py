"""Writing rows to the KV cache with the device's fused op, if this torch_npu and this device have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specgraph import ops
from specgraph.device import Support, no, trial
from specgraph.ops import KVCache, NewRows
from specgraph.ops.kv_cache import rotate

if TYPE_CHECKING:
    from specgraph_npu.platform import NpuPlatform


def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write rows [T, heads, dim] to their slots in dense caches. Rows with a negative slot are not written."""
    torch.ops.npu.npu_scatter_pa_kv_cache(
        key.contiguous(), value.contiguous(), key_cache, value_cache, slot_mapping, cache_mode="Norm"
    )


def rotate_and_store(query: Tensor, new: NewRows, cache: KVCache) -> Tensor:
    """See `specgraph.ops.rotate_and_store`. It leaves other dtypes, and caches with gaps, to the plain torch ops."""
    key, value, rotary, positions, slot_mapping = new
    fits = cache.key.dtype == key.dtype and key.dtype in (torch.bfloat16, torch.float16)
    if not fits or not all(part.is_contiguous() for part in cache):
        return NotImplemented
    if rotary is None:
        query = query.clone()
    else:
        query, key = rotate(query, rotary, positions), rotate(key, rotary, positions)
    write(key, value, *cache, slot_mapping)
    return query


def use_fused_write(platform: NpuPlatform) -> Support:
    """Make `rotate_and_store` the core's op of that name for NPU tensors, if it passes a trial on the device."""
    if not hasattr(torch.ops.npu, "npu_scatter_pa_kv_cache"):
        return no("torch_npu has no npu_scatter_pa_kv_cache")
    if support := trial.claim(platform, _writes_live_rows_only):
        ops.implement("rotate_and_store", "PrivateUse1", rotate_and_store)
    return support


def _writes_live_rows_only(platform: NpuPlatform) -> str | None:
    """Check that a row with slot -1 writes nothing, also not before the cache: CANN's documents only describe slots
    from 0 on. Return the error found, or None."""
    host = torch.arange(2 * 3 * 32).view(2, 3, 1, 32).to(torch.bfloat16)
    rows, memory = host.to(platform.device), torch.zeros(2, 4, 16, 1, 32, dtype=torch.bfloat16, device=platform.device)
    write(rows[0], rows[1], memory[0, 1:], memory[1, 1:], torch.tensor([17, -1, 2], device=platform.device))
    expected = torch.zeros(2, 64, 1, 32, dtype=torch.bfloat16)
    expected[:, 16 + 17], expected[:, 16 + 2] = host[:, 0], host[:, 2]
    same = torch.equal(trial.on_host(memory).view(2, 64, 1, 32), expected)
    return None if same else "a row was not written to its slot, or one without a slot was written"
