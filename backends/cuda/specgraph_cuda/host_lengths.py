"""Paged attention with host lengths on a GPU: the lengths are parameters of a kernel that stores them.

The attention kernels read them from device memory, as with device lengths, so both give the same bits. A graph holds
the lengths in the storing kernel's node, which a task update rewrites.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from specgraph import ops
from specgraph_cuda.tasks import host_values


def register_host_attention() -> None:
    """Make these the implementations of the attention ops with host lengths for CUDA tensors."""
    ops.implement("paged_attention_host", "CUDA", paged_attention_host)
    ops.implement("rotate_store_attend_host", "CUDA", rotate_store_attend_host)
    ops.implement("windowed_attention_host", "CUDA", windowed_attention_host)


def paged_attention_host(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    scale: float,
    causal: bool = True,
    out: Tensor,
) -> None:
    """See `specgraph.ops.paged_attention_host`."""

    def attend(lengths: Tensor, starts: Tensor, query_len: int) -> Tensor:
        return ops.paged_attention(
            query, key_cache, value_cache, block_table, lengths, starts, query_len=query_len, scale=scale, causal=causal
        )

    _with_device_lengths(attend, query, out, query_lens, seq_lens, ("paged_attention_host", scale, causal))


def rotate_store_attend_host(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    scale: float,
    causal: bool = True,
    out: Tensor,
) -> None:
    """See `specgraph.ops.rotate_store_attend_host`."""

    def attend(lengths: Tensor, starts: Tensor, query_len: int) -> Tensor:
        return ops.rotate_store_attend(
            query, key, value, rotary, positions, slot_mapping, key_cache, value_cache, block_table, lengths, starts,
            query_len=query_len, scale=scale, causal=causal,
        )  # fmt: skip

    _with_device_lengths(attend, query, out, query_lens, seq_lens, ("rotate_store_attend_host", scale, causal))


def windowed_attention_host(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    sinks: Tensor | None,
    *,
    scale: float,
    window: int,
    out: Tensor,
) -> None:
    """See `specgraph.ops.windowed_attention_host`."""

    def attend(lengths: Tensor, starts: Tensor, query_len: int) -> Tensor:
        return ops.windowed_attention(
            query, key_cache, value_cache, block_table, lengths, starts, sinks, query_len=query_len, scale=scale,
            window=window,
        )  # fmt: skip

    _with_device_lengths(attend, query, out, query_lens, seq_lens, ("windowed_attention_host", scale, window))


def _with_device_lengths(
    attend: Callable[[Tensor, Tensor, int], Tensor],
    query: Tensor,
    out: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    op: Hashable,
) -> None:
    """Write attend(seq_lens, query_start_loc, query_len) to `out`; the first two are tensors.

    The launches depend on shapes, and on whether all requests have the same number of rows, but not on the lengths: an
    update may change those.
    """
    requests, rows = len(seq_lens), query.shape[0]
    each = rows // max(requests, 1)
    uniform = requests == 1 or (each * requests == rows and all(count == each for count in query_lens))
    starts = -(-requests // 4) * 4  # aligned, as compiled kernels expect of pointers
    values = [*seq_lens, *[0] * (starts - requests), 0, *accumulate(query_lens)]
    fixed = (op, query.data_ptr(), out.data_ptr(), requests, uniform)
    lengths, is_rest_needed = host_values(values, query.device, fixed)
    if not is_rest_needed:
        return
    result = attend(lengths[:requests], lengths[starts:], each if uniform else rows)
    if not uniform or 1 == requests < rows:  # rows after the last request's are not written by the kernel
        after = torch.arange(rows, device=query.device) >= lengths[starts + requests]
        result.masked_fill_(after[:, None, None], 0.0)
    out.copy_(result)
