"""Ops whose kernels want packed rows get them, or an error."""

from __future__ import annotations

import pytest
import torch
from specgraph import ops
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows
from specgraph_run.decoder.ops import move_kv

from specgraph_musa.packed_rows import packed, with_packed_rows


def test_packed_tensors_pass_through():
    for tensor in (
        torch.zeros(3),
        torch.zeros(3, 4),
        torch.zeros(8, 4)[::2],
        torch.zeros(5, 9)[:, :4],
        torch.zeros(()),
        torch.zeros(4, 1, 6).expand(4, 1, 6),
        torch.zeros(1, 3).t()[:, :1],
    ):
        assert packed(tensor) is tensor, (tensor.shape, tensor.stride())


def test_others_are_copied():
    cube = torch.arange(24).view(2, 3, 4)
    for tensor in (cube[0].t(), torch.arange(8)[::2], cube.transpose(1, 2)):
        copy = packed(tensor)
        assert copy is not tensor
        assert copy.is_contiguous()
        assert torch.equal(copy, tensor)


def test_a_block_table_with_a_foreign_last_stride_is_packed():
    """stride(-1) != 1, which failed in vllm-musa."""
    table = torch.arange(12, dtype=torch.int32).view(4, 3).t()
    starts, seen = torch.zeros(4, dtype=torch.int64), []
    packing = with_packed_rows(ops.begin_rows, lambda *args, **kwargs: seen.append((args, kwargs)))
    plan = RowPlan(2, 16, 4)
    packing(RowInputs(starts, table), plan, past=None)
    (((handed, seen_plan), named),) = seen
    assert handed.start_positions is starts
    assert handed.block_table.stride() == (4, 1)
    assert torch.equal(handed.block_table, table)
    assert (seen_plan, named) == (plan, {"past": None})


def test_kv_caches_keep_the_strides_of_the_host_engine():
    """vLLM's TRITON_ATTN has keys and values side by side: a copy of its cache would be read, or written and lost."""
    side_by_side = torch.zeros(4, 2, 8, 32).transpose(1, 2)
    cache, seen = ops.KVCache(*side_by_side.split(16, dim=3)), []
    for op, given in (
        (ops.rotate_and_store, (torch.zeros(3, 2, 16), None, cache)),
        (move_kv, (*cache, None, None)),
    ):
        with_packed_rows(op, lambda *args: seen.append(args))(*given)
    assert seen[0][2] is cache
    assert all(handed is own for handed, own in zip(seen[1], cache, strict=False))


def test_an_argument_that_is_written_is_never_copied():
    lens, four, eight = torch.zeros(4, dtype=torch.int32)[::2], torch.zeros(4), torch.zeros(8)[::2]
    with pytest.raises(ValueError, match="advance writes 'seq_lens'"):
        with_packed_rows(ops.advance, ops.advance.reference)(lens)
    with pytest.raises(ValueError, match="begin_rows writes 'rows_token_ids'"):
        with_packed_rows(ops.begin_rows, ops.begin_rows.reference)(rows=Rows(four, four, four, token_ids=eight))
