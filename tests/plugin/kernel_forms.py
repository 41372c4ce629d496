"""The kernels that `fill_batch` would need on a device: each form of a hand-over is compiled when it first comes."""

from __future__ import annotations

from typing import Any

import pytest
from specgraph_plugin import fast_path, prompts, verify_output


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list that gets the form of every hand-over from now on: what Triton compiles a kernel for.

    These are dtypes, which tensors are None, sizes that are constants, addresses that are multiples of 16 bytes, and
    strides and widths that are 1 or multiples of 16.
    """
    forms, fill = list[Any](), verify_output.fill_batch

    def fill_batch(end: Any, into: Any, *rest: Any) -> None:
        given = end.token_ids, end.num_sampled, end.starts, end.table, end.first_rows, end.last_tokens, end.last_rows
        tensors = *given, end.table_rows, *end.hidden_states, into.sampled_token_ids, into.aux_hidden, into.block_table
        pointers = [None if each is None else (each.dtype, each.data_ptr() % 16) for each in tensors]
        widths = into.block_table.stride(0), into.block_table.shape[1]
        states = [state.shape[1] for state in end.hidden_states]
        forms.append(
            (end.table_of_slots, into.query_len, states, pointers, [(width == 1, width % 16 == 0) for width in widths])
        )
        fill(end, into, *rest)

    for module in (fast_path, prompts):
        monkeypatch.setattr(module, "fill_batch", fill_batch)
    return forms
