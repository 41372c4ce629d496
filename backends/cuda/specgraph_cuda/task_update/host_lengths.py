"""Paged attention with host lengths on a GPU: the lengths are parameters of a kernel that stores them.

The attention kernels then read the lengths from device memory, as they read device lengths, so both give the same bits.
A graph holds the lengths in the storing kernel's node, and a task update rewrites them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from specgraph import ops
from specgraph.ops import DeviceLengths, HostLengths, KVCache, Mask, NewRows
from specgraph_cuda.task_update.tasks import host_values


def register_host_attention() -> None:
    """Make the functions below the implementations of attention with host lengths for CUDA tensors."""
    ops.implement("paged_attention_host", "CUDA", paged_attention_host)
    ops.implement("attend_part_host", "CUDA", attend_part_host)


def paged_attention_host(
    query: Tensor,
    cache: KVCache,
    block_table: Tensor,
    lengths: HostLengths,
    mask: Mask,
    new: NewRows | None = None,
    *,
    scale: float,
    out: Tensor,
) -> None:
    """See `specgraph.ops.paged_attention_host`.

    The launches depend on shapes, and on whether all requests have the same number of rows. They don't depend on the
    lengths, so an update may change the lengths.
    """
    query_lens, seq_lens = lengths
    requests, rows = len(seq_lens), query.shape[0]
    each = rows // max(requests, 1)
    uniform = requests == 1 or (each * requests == rows and all(count == each for count in query_lens))
    starts = -(-requests // 4) * 4  # compiled kernels expect an aligned pointer
    values = [*seq_lens, *[0] * (starts - requests), 0, *accumulate(query_lens)]
    options = new is None, scale, mask.causal, mask.window, mask.tree_len
    fixed = (options, query.data_ptr(), out.data_ptr(), requests, uniform)
    stored, is_rest_needed = host_values(values, query.device, fixed)
    if not is_rest_needed:
        return
    on_device = DeviceLengths(stored[:requests], stored[starts:], each if uniform else rows)
    result = ops.paged_attention(query, cache, block_table, on_device, mask, new, scale=scale)
    if not uniform or 1 == requests < rows:  # the kernel writes no rows after the last request's
        after = torch.arange(rows, device=query.device) >= stored[starts + requests]
        result.masked_fill_(after[:, None, None], 0.0)
    out.copy_(result)


def attend_part_host(
    query: Tensor, cache: KVCache, block_table: Tensor, seq_lens: Sequence[int], *, scale: float, out: Tensor
) -> None:
    """See `specgraph.ops.attend_part_host`. The launches depend on shapes, not on the lengths."""
    fixed = (scale, query.data_ptr(), out.data_ptr(), len(query))
    stored, is_rest_needed = host_values(seq_lens, query.device, fixed)
    if is_rest_needed:
        starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        seen = DeviceLengths(stored, starts, 1)
        out.copy_(ops.attend_part(query, cache, block_table, seen, Mask(causal=False), 0, 1, scale=scale))
