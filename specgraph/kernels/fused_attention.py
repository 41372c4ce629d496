"""Rotation, cache write and attention as one op, for devices that do all three in one kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specgraph.kernels.kv_cache import rotate_and_store
from specgraph.kernels.library import define
from specgraph.kernels.paged_attention import paged_attention


def rotate_store_attend_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    query_len: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """The two ops that it stands for."""
    query = rotate_and_store(query, key, value, rotary, positions, slot_mapping, key_cache, value_cache)
    return paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        query_len=query_len,
        scale=scale,
        causal=causal,
    )


def _fake(query: Tensor, *args: Any) -> Tensor:
    return query.new_empty(query.shape)


_op = define(
    "rotate_store_attend(Tensor query, Tensor key, Tensor value, Tensor? rotary, Tensor positions,"
    " Tensor slot_mapping, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor block_table, Tensor seq_lens,"
    " Tensor query_start_loc, int query_len, float scale, bool causal) -> Tensor",
    reference=rotate_store_attend_reference,
    fake=_fake,
)


def rotate_store_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    query_len: int,
    scale: float,
    causal: bool = True,
) -> Tensor:
    """`rotate_and_store`, then `paged_attention` with the rotated query. Arguments and result as in those."""
    return _op(
        query, key, value, rotary, positions, slot_mapping, key_cache, value_cache, block_table, seq_lens,
        query_start_loc, query_len, scale, causal,
    )  # fmt: skip
