"""The Triton implementations of the draft ops, and their registration under a device's dispatch key."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from specgraph.kernels import decoder, fused_attention, load
from specgraph.kernels.library import implement
from specgraph.kernels.paged_attention import dense_attention
from specgraph.kernels.triton import attention, linear, rows
from specgraph.kernels.triton import norm as norm_kernels
from specgraph.kernels.triton.launch import LaunchOptions, Tile

MAX_ROWS = 64
"""Above this many rows a linear is no longer bound by its weights, and the library's matmul is as good."""

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TritonOps:
    """One device's Triton ops. Every launch depends only on shapes, so equal shapes give equal bits."""

    options: LaunchOptions

    # Linears

    def norm_linear(
        self, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """See `specgraph.kernels.norm_linear`."""
        x = self._normed(x, norm, eps)
        tile = self._tile("linear", x, weight, weight.shape[0])
        if tile is None:
            return decoder.norm_linear_reference(x, None, eps, weight, bias, residual)
        out = x.new_empty(x.shape[0], weight.shape[0])
        residual = None if residual is None else _rows(residual)
        linear.linear_kernel[(triton.cdiv(weight.shape[0], tile.columns),)](
            x, weight, bias, residual, out, x.shape[0], weight.shape[0], weight.shape[1], x.stride(0),
            0 if residual is None else residual.stride(0), BIASED=bias is not None, RESIDUAL=residual is not None,
            **self._shape(tile, x),
        )  # fmt: skip
        return out

    def norm_gate_up(self, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `specgraph.kernels.norm_gate_up`."""
        columns = weight.shape[0] // 2
        x = self._normed(x, norm, eps)
        tile = self._tile("gate_up", x, weight, columns)
        if tile is None:
            return decoder.norm_gate_up_reference(x, None, eps, weight, bias)
        out = x.new_empty(x.shape[0], columns)
        linear.gate_up_kernel[(triton.cdiv(columns, tile.columns),)](
            x, weight, bias, out, x.shape[0], columns, weight.shape[1], x.stride(0), BIASED=bias is not None,
            **self._shape(tile, x),
        )  # fmt: skip
        return out

    def pair_linear(
        self, token_ids: Tensor, table: Tensor, table_norm: Tensor | None, hidden: Tensor,
        hidden_norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.kernels.pair_linear`."""
        hidden, table = _rows(hidden), table.contiguous()
        rows_, width, hidden_width = hidden.shape[0], table.shape[1], hidden.shape[1]
        pair = hidden.new_empty(rows_, width + hidden_width)
        if rows_:
            norm_kernels.pair_kernel[(rows_, 2)](
                token_ids.contiguous(), table, table_norm, hidden, hidden_norm, pair, width, hidden_width,
                hidden.stride(0), eps, TABLE_NORMED=table_norm is not None, HIDDEN_NORMED=hidden_norm is not None,
                WIDTH=triton.next_power_of_2(width), HIDDEN_WIDTH=triton.next_power_of_2(hidden_width), num_warps=8,
                **self._common(),
            )  # fmt: skip
        return self.norm_linear(pair, None, eps, weight, bias, None)

    def _normed(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        x = _rows(x)
        if norm is None or x.shape[0] == 0 or x.dim() != 2:
            return decoder.normed(x, norm, eps)
        out = x.new_empty(x.shape)
        norm_kernels.norm_kernel[(x.shape[0],)](
            x,
            norm,
            out,
            x.shape[1],
            x.stride(0),
            eps,
            WIDTH=triton.next_power_of_2(x.shape[1]),
            num_warps=8,
            **self._common(),
        )
        return out

    def greedy_head(
        self, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, draft_to_target: Tensor | None,
        draft_step: Tensor, token_ids: Tensor, draft_token_ids: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.kernels.greedy_head`."""
        x = self._normed(x, norm, eps)
        tile = self._tile("head", x, weight, weight.shape[0])
        if tile is None:
            logits = decoder.norm_linear_reference(x, None, eps, weight, None, None)
            return self.draft_greedy(logits, draft_to_target, draft_step, token_ids, draft_token_ids)
        blocks = triton.cdiv(weight.shape[0], tile.columns)
        value = x.new_empty(blocks, x.shape[0], dtype=torch.float32)
        index = x.new_empty(blocks, x.shape[0], dtype=torch.int32)
        linear.head_kernel[(blocks,)](
            x, weight, value, index, x.shape[0], weight.shape[0], weight.shape[1], x.stride(0), **self._shape(tile, x)
        )
        return self._finish(value, index, draft_to_target, draft_step, token_ids, draft_token_ids)

    def draft_greedy(
        self, logits: Tensor, draft_to_target: Tensor | None, draft_step: Tensor, token_ids: Tensor,
        draft_token_ids: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.kernels.draft_greedy`."""
        logits = _rows(logits)
        count, vocab = logits.shape
        blocks = triton.cdiv(vocab, 4096)
        value = logits.new_empty(blocks, count, dtype=torch.float32)
        index = logits.new_empty(blocks, count, dtype=torch.int32)
        linear.best_kernel[(blocks, count)](
            logits, value, index, count, vocab, logits.stride(0), COLUMNS=4096, num_warps=8, **self._common()
        )
        self._finish(value, index, draft_to_target, draft_step, token_ids, draft_token_ids)

    def _finish(
        self, value: Tensor, index: Tensor, draft_to_target: Tensor | None, draft_step: Tensor, token_ids: Tensor,
        draft_token_ids: Tensor,
    ) -> None:  # fmt: skip
        if not token_ids.is_contiguous() or draft_token_ids.stride(1) != 1:
            raise ValueError("token_ids and the rows of draft_token_ids must be contiguous")
        blocks, count = value.shape
        linear.finish_greedy_kernel[(count,)](
            value, index, draft_to_target, draft_step, token_ids, draft_token_ids, blocks, count,
            draft_token_ids.stride(0), MAPPED=draft_to_target is not None, BLOCKS=triton.next_power_of_2(blocks),
            num_warps=4, **self._common(),
        )  # fmt: skip

    # Attention

    def rotate_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, rotary: Tensor | None, positions: Tensor,
        slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.kernels.rotate_and_store`."""
        query, key, value = _heads(query), _heads(key), _heads(value)
        count, heads, dim = query.shape
        out = torch.empty((count, heads, dim), dtype=query.dtype, device=query.device)
        total = heads + 2 * key.shape[1]
        per_program = 16
        if count:
            rows.rotate_and_store_kernel[(count, triton.cdiv(total, per_program))](
                query, key, value, rotary, positions.contiguous(), slot_mapping.contiguous(), out, key_cache,
                value_cache, query.stride(0), key.stride(0), value.stride(0),
                0 if rotary is None else rotary.stride(0), heads, key.shape[1], DIM=dim,
                DIMS=triton.next_power_of_2(dim), HALF=0 if rotary is None else rotary.shape[1] // 2,
                HEADS=per_program, ROTATED=rotary is not None, num_warps=4, **self._common(),
            )  # fmt: skip
        return out

    def paged_attention(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
        query_start_loc: Tensor, query_len: int, scale: float, causal: bool,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.kernels.paged_attention`."""
        return self._attend(
            query, None, None, None, None, None, key_cache, value_cache, block_table, seq_lens, query_start_loc,
            query_len, scale, causal,
        )  # fmt: skip

    def rotate_store_attend(
        self, query: Tensor, key: Tensor, value: Tensor, rotary: Tensor | None, positions: Tensor,
        slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
        query_start_loc: Tensor, query_len: int, scale: float, causal: bool,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.kernels.rotate_store_attend`: one kernel when every request has one row."""
        single = query_len == 1 and query.shape[0] == seq_lens.shape[0]
        if single and (rotary is None or rotary.shape[1] == query.shape[2]):
            return self._attend(
                query, key, value, rotary, positions, slot_mapping, key_cache, value_cache, block_table, seq_lens,
                query_start_loc, query_len, scale, causal,
            )  # fmt: skip
        return fused_attention.rotate_store_attend_reference(
            query, key, value, rotary, positions, slot_mapping, key_cache, value_cache, block_table, seq_lens,
            query_start_loc, query_len, scale, causal,
        )  # fmt: skip

    def _attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, rotary: Tensor | None,
        positions: Tensor | None, slot_mapping: Tensor | None, key_cache: Tensor, value_cache: Tensor,
        block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, query_len: int, scale: float, causal: bool,
    ) -> Tensor:  # fmt: skip
        query = _heads(query)
        count, heads, dim = query.shape
        kv_heads, block = key_cache.shape[2], key_cache.shape[1]
        if not _attends(dim, key_cache, value_cache):
            if key is None or value is None or positions is None or slot_mapping is None:
                return dense_attention(
                    query, key_cache, value_cache, block_table, seq_lens, query_start_loc, query_len, scale, causal
                )
            return fused_attention.rotate_store_attend_reference(
                query, key, value, rotary, positions, slot_mapping, key_cache, value_cache, block_table, seq_lens,
                query_start_loc, query_len, scale, causal,
            )  # fmt: skip
        requests, group = seq_lens.shape[0], heads // kv_heads
        out = torch.empty((count, heads, dim), dtype=query.dtype, device=query.device)
        if count == 0:
            return out
        wide = query.dtype == torch.float32
        tile_rows = min(max(triton.next_power_of_2(query_len * group), 16), 32 if wide else 64)
        tiles = triton.cdiv(query_len * group, tile_rows)
        splits = attention_splits(requests * kv_heads * tiles, self.options.compute_units)
        keys = 32 if wide else 64
        if splits > 1:
            shape = (count * heads, splits)
            partial = torch.empty((*shape, dim), dtype=torch.float32, device=query.device)
            top = torch.empty(shape, dtype=torch.float32, device=query.device)
            total = torch.empty(shape, dtype=torch.float32, device=query.device)
        else:
            partial = top = total = None
        if key is not None and value is not None:
            key, value = _heads(key), _heads(value)
            if key.stride(0) != value.stride(0):
                key, value = key.contiguous(), value.contiguous()
        attention.attend_kernel[(requests * tiles, kv_heads, splits)](
            query, key, value, rotary, positions, slot_mapping, key_cache, value_cache, block_table, seq_lens,
            query_start_loc, out, partial, top, total, query.stride(0), 0 if key is None else key.stride(0),
            0 if rotary is None else rotary.stride(0), block_table.stride(0), block_table.shape[1], heads, scale,
            GROUP=group, HALF=dim // 2, KV_HEADS=kv_heads, BLOCK=block, ROWS=tile_rows, KEYS=keys, SPLITS=splits,
            TILES=tiles, CAUSAL=causal, FUSED=key is not None, ROTATED=rotary is not None,
            PRECISION="ieee" if wide else "tf32", num_warps=4, num_stages=2, **self._common(),
        )  # fmt: skip
        if splits > 1:
            attention.combine_kernel[(triton.cdiv(count * heads, 4),)](
                partial, top, total, out, count * heads, DIM=dim, SPLITS=splits, ITEMS=4, num_warps=4,
                **self._common(),
            )  # fmt: skip
        return out

    # Rows, first nodes and advancing

    def take_rows(self, source: Tensor, chosen: Tensor | None, out: Tensor) -> None:
        """See `specgraph.kernels.take_rows`."""
        if source.stride(1) != 1 or out.stride(1) != 1:
            out.copy_(source if chosen is None else source[chosen])
        elif out.shape[0]:
            rows.take_rows_kernel[(out.shape[0],)](
                source, chosen, out, out.shape[1], source.stride(0), out.stride(0), CHOSEN=chosen is not None,
                WIDTH=triton.next_power_of_2(out.shape[1]), num_warps=8, **self._common(),
            )  # fmt: skip

    def load_round(
        self, sampled_token_ids: Tensor, num_sampled: Tensor, start_positions: Tensor, aux_hidden: Tensor,
        block_table: Tensor, to_sampled_token_ids: Tensor, to_num_sampled: Tensor, to_start_positions: Tensor,
        to_aux_hidden: Tensor, to_block_table: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.kernels.load_round`."""
        whole = (sampled_token_ids, num_sampled, start_positions, aux_hidden, to_sampled_token_ids, to_aux_hidden,
                 to_block_table)  # fmt: skip
        if block_table.stride(1) != 1 or not all(tensor.is_contiguous() for tensor in whole):
            load.load_round_reference(
                sampled_token_ids, num_sampled, start_positions, aux_hidden, block_table, to_sampled_token_ids,
                to_num_sampled, to_start_positions, to_aux_hidden, to_block_table,
            )  # fmt: skip
            return
        n, query_len = sampled_token_ids.shape
        elements, chunk = query_len * aux_hidden.shape[1], 8192
        rows.load_round_kernel[(to_num_sampled.shape[0], 1 + triton.cdiv(elements, chunk))](
            sampled_token_ids, num_sampled, start_positions, aux_hidden, block_table, to_sampled_token_ids,
            to_num_sampled, to_start_positions, to_aux_hidden, to_block_table, n, query_len, block_table.shape[1],
            to_block_table.shape[1], elements, block_table.stride(0), ROW=triton.next_power_of_2(query_len),
            TABLE=triton.next_power_of_2(to_block_table.shape[1]), CHUNK=chunk, num_warps=4, **self._common(),
        )  # fmt: skip

    def begin_propose(
        self, sampled_token_ids: Tensor, num_sampled: Tensor, start_positions: Tensor, block_table: Tensor,
        max_model_len: int, block_size: int, token_ids: Tensor, positions: Tensor, slot_mapping: Tensor,
        seq_lens: Tensor, last_rows: Tensor, step_positions: Tensor, step_seq_lens: Tensor, draft_step: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.kernels.begin_propose`."""
        sampled_token_ids = _rows(sampled_token_ids)
        requests, query_len = sampled_token_ids.shape
        rows.begin_propose_kernel[(requests,)](
            sampled_token_ids, num_sampled.contiguous(), start_positions.contiguous(), block_table, token_ids,
            positions, slot_mapping,
            seq_lens, last_rows, step_positions, step_seq_lens, draft_step, query_len, sampled_token_ids.stride(0),
            block_table.stride(0), block_table.shape[1], max_model_len, BLOCK=block_size,
            WIDTH=triton.next_power_of_2(query_len), num_warps=1, **self._common(),
        )  # fmt: skip

    def begin_verify(
        self, last_token_ids: Tensor, draft_token_ids: Tensor, start_positions: Tensor, block_table: Tensor,
        max_model_len: int, block_size: int, token_ids: Tensor, positions: Tensor, slot_mapping: Tensor,
        seq_lens: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.kernels.begin_verify`."""
        draft_token_ids = _rows(draft_token_ids)
        query_len = draft_token_ids.shape[1] + 1
        rows.begin_verify_kernel[(last_token_ids.shape[0],)](
            last_token_ids.contiguous(), draft_token_ids, start_positions.contiguous(), block_table, token_ids,
            positions, slot_mapping,
            seq_lens, query_len, draft_token_ids.stride(0), block_table.stride(0), block_table.shape[1],
            max_model_len, BLOCK=block_size, WIDTH=triton.next_power_of_2(query_len), num_warps=1, **self._common(),
        )  # fmt: skip

    def advance(
        self, seq_lens: Tensor, positions: Tensor, slot_mapping: Tensor, draft_step: Tensor, block_table: Tensor,
        max_model_len: int, block_size: int,
    ) -> None:  # fmt: skip
        """See `specgraph.kernels.advance`."""
        rows.advance_kernel[(1,)](
            seq_lens, positions, slot_mapping, draft_step, block_table, seq_lens.shape[0], block_table.stride(0),
            block_table.shape[1], max_model_len, BLOCK=block_size,
            REQUESTS=triton.next_power_of_2(seq_lens.shape[0]), num_warps=1, **self._common(),
        )  # fmt: skip

    # Choices

    def _tile(self, kind: str, x: Tensor, weight: Tensor, columns: int) -> Tile | None:
        count, depth = x.shape[0], weight.shape[1]
        if not 0 < count <= MAX_ROWS or x.dtype not in _HALVES or weight.dtype != x.dtype or not weight.is_contiguous():
            return None
        tile = self.options.tile(kind, _padded(count), columns, depth)
        return tile if tile is not None and depth % tile.depth == 0 else None

    def _shape(self, tile: Tile, x: Tensor) -> dict[str, Any]:
        return {
            "ROWS": _padded(x.shape[0]),
            "COLUMNS": tile.columns,
            "DEPTH": tile.depth,
            "PREFETCH": tile.prefetch,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            **self._common(),
        }

    def _common(self) -> dict[str, Any]:
        return {"OVERLAP": self.options.overlap, **self.options.extra}


def attention_splits(programs: int, compute_units: int) -> int:
    """Splits of the context: a power of two that gives up to four programs a compute unit, at most 16."""
    splits = 1
    while splits < 16 and programs * splits * 2 <= 4 * compute_units:
        splits *= 2
    return splits


def _attends(dim: int, key_cache: Tensor, value_cache: Tensor) -> bool:
    power_of_two = dim >= 32 and dim & (dim - 1) == 0
    return power_of_two and key_cache.is_contiguous() and value_cache.is_contiguous()


def _padded(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _heads(x: Tensor) -> Tensor:
    """[T, heads, dim] with heads side by side: a view of a packed projection will do."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


_OPS: dict[str, Callable[[TritonOps], Callable[..., Any]]] = {
    "advance": lambda ops: ops.advance,
    "begin_propose": lambda ops: ops.begin_propose,
    "begin_verify": lambda ops: ops.begin_verify,
    "draft_greedy": lambda ops: ops.draft_greedy,
    "greedy_head": lambda ops: ops.greedy_head,
    "load_round": lambda ops: ops.load_round,
    "norm_gate_up": lambda ops: ops.norm_gate_up,
    "norm_linear": lambda ops: ops.norm_linear,
    "paged_attention": lambda ops: ops.paged_attention,
    "pair_linear": lambda ops: ops.pair_linear,
    "rotate_and_store": lambda ops: ops.rotate_and_store,
    "take_rows": lambda ops: ops.take_rows,
    "rotate_store_attend": lambda ops: ops.rotate_store_attend,
}


def register(
    dispatch_key: str,
    options: LaunchOptions | None = None,
    around: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None,
) -> TritonOps:
    """Make these the implementations of the draft ops under a torch dispatch key. The first registration stays.

    Args:
        around: what a device puts around each: (op name, implementation) -> implementation.
    """
    ops = TritonOps(options or LaunchOptions())
    for name, method in _OPS.items():
        function = method(ops)
        implement(name, dispatch_key, function if around is None else around(name, function))
    return ops
