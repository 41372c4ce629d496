"""Kernels that copy into persistent buffers: selected rows, and a host engine's batch."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import Launcher, ceil_div, power_of_two
from specgraph.ops.copies import BatchTensors


@triton.jit
def take_rows_kernel(source, chosen, out, size, source_stride, out_stride, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    """out[i] = source[chosen[i]], one program per row."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    at = row
    if chosen is not None:
        at = tl.load(chosen + row)
    column = tl.arange(0, WIDTH)
    value = tl.load(source + at * source_stride + column, mask=column < size)
    tl.store(out + row * out_stride + column, value, mask=column < size)


@triton.jit(do_not_specialize=["n", "query_len", "width", "to_width", "aux_elements", "table_stride"])
def load_batch_kernel(
    sampled_token_ids, num_sampled, start_positions, aux_hidden, block_table, to_sampled_token_ids, to_num_sampled,
    to_start_positions, to_aux_hidden, to_block_table, n, query_len, width, to_width, aux_elements, table_stride,
    ROW: tl.constexpr, TABLE: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per request and part. Part 0 copies the small tensors, each other CHUNK elements of aux_hidden."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    part = tl.program_id(1)
    live = request < n
    if part == 0:
        count = tl.load(num_sampled + request, mask=live, other=0)
        tl.store(to_num_sampled + request, count)
        if live:
            tl.store(to_start_positions + request, tl.load(start_positions + request))
            offset = tl.arange(0, ROW)
            token = tl.load(sampled_token_ids + request * query_len + offset, mask=offset < query_len, other=0)
            tl.store(to_sampled_token_ids + request * query_len + offset, token, mask=offset < query_len)
            column = tl.arange(0, TABLE)
            block = tl.load(block_table + request * table_stride + column, mask=column < width, other=0)
            tl.store(to_block_table + request * to_width + column, block, mask=column < to_width)
    elif live:
        at = (part - 1) * CHUNK + tl.arange(0, CHUNK)
        inside = at < aux_elements
        at += request.to(tl.int64) * aux_elements
        tl.store(to_aux_hidden + at, tl.load(aux_hidden + at, mask=inside), mask=inside)


class CopyOps(Launcher):
    """Implementations of the ops in `specgraph.ops.copies`."""

    __slots__ = ()

    def take_rows(self, source: Tensor, rows: Tensor | None, out: Tensor) -> None:
        if source.stride(1) != 1 or out.stride(1) != 1:
            return NotImplemented
        if out.shape[0]:
            self.launch(
                take_rows_kernel, (out.shape[0],),
                source, rows, out, out.shape[1], source.stride(0), out.stride(0),
                WIDTH=power_of_two(out.shape[1]), num_warps=8,
            )  # fmt: skip

    def load_batch(self, given: BatchTensors, to: BatchTensors) -> None:
        whole = (*given[:4], to.sampled_token_ids, to.aux_hidden, to.block_table)
        if given.block_table.stride(1) != 1 or not all(tensor.is_contiguous() for tensor in whole):
            return NotImplemented
        n, query_len = given.sampled_token_ids.shape
        elements, chunk = query_len * given.aux_hidden.shape[1], 8192
        width, to_width = given.block_table.shape[1], to.block_table.shape[1]
        self.launch_again(
            load_batch_kernel,
            (to.num_sampled.shape[0], 1 + ceil_div(elements, chunk), 1),
            (*given, *to),
            (n, query_len, width, to_width, elements, given.block_table.stride(0)),
            {"ROW": power_of_two(query_len), "TABLE": power_of_two(to_width), "CHUNK": chunk},
            num_warps=4,
        )
