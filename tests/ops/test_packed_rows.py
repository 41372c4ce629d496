"""Ops whose kernels want packed rows get them, or an error."""

from __future__ import annotations

import pytest
import torch

from specgraph import ops  # registers the ops
from specgraph.ops.packed_rows import packed, packed_arguments

assert ops.__all__


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
    schema = torch.ops.specgraph.paged_attention.default._schema
    table = torch.arange(12, dtype=torch.int32).view(4, 3).t()
    args = torch.zeros(3, 2, 8), torch.zeros(5, 4, 2, 8), torch.zeros(5, 4, 2, 8), table
    given, _ = packed_arguments(schema, args, {})
    assert given[3].stride() == (4, 1)
    assert torch.equal(given[3], table)
    assert all(a is b for a, b in zip(given[:3], args[:3], strict=True))


def test_an_argument_that_is_written_is_never_copied():
    schema = torch.ops.specgraph.advance.default._schema
    lens = torch.zeros(4, dtype=torch.int32)[::2]
    with pytest.raises(ValueError, match="writes 'seq_lens'"):
        packed_arguments(schema, (lens, *(torch.zeros(2, dtype=torch.int64) for _ in range(3))), {})
    schema = torch.ops.specgraph.begin_rows.default._schema
    tokens = torch.zeros(8, dtype=torch.int64)[::2]
    with pytest.raises(ValueError, match="writes 'rows_token_ids'"):
        packed_arguments(schema, (), {"rows_token_ids": tokens})
