"""Bugs of kernels that devices take for some sizes only: passed by suite 1.3, whose sizes reach plain torch there."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from mutants.draft_ops import change_arguments, replace_op
from mutants.registry import mutant
from torch import Tensor

from specgraph import ops
from specgraph.ops import NewRows
from specgraph.ops.begin_rows import RowPlan
from specgraph.ops.copies import RoundTensors
from specgraph.ops.past_rows import PastRows

HALVES = (torch.bfloat16, torch.float16)
PAGED: Any = import_module("specgraph.ops.paged_attention")
"""The module: `specgraph.ops` has an op of its name."""


def _in_tiles(x: Tensor) -> bool:
    return x.dtype in HALVES and x.shape[1] % 128 == 0


@mutant("linears-in-tiles", "kernel")
def without_eps(patch: pytest.MonkeyPatch) -> None:
    """The kernel of two linears in half precision has no eps in the norm between them."""

    def change(x: Tensor, weight: Any, residual: Any, norm: Any, following: Any) -> tuple[Any, ...]:
        return x, weight, residual, norm._replace(eps=0.0) if _in_tiles(x) else norm, following

    change_arguments(patch, "linear_norm_linear", change)


@mutant("linears-in-tiles-columns", "kernel", hazard="linears-in-tiles")
def columns_past_the_tiles(patch: pytest.MonkeyPatch) -> None:
    """A gated linear of more than 13,312 columns leaves out those past them."""

    def broken(real: Any, x: Tensor, *rest: Any) -> Tensor:
        out = real(x, *rest)
        out[:, 13312:] = 0
        return out

    replace_op(patch, "norm_gate_up", broken)


@mutant("linears-in-tiles-rows", "kernel", hazard="linears-in-tiles")
def rows_past_the_blocks(patch: pytest.MonkeyPatch) -> None:
    """A linear over more than 64 rows of more than 8,192 columns leaves out rows past the 192nd."""

    def broken(real: Any, x: Tensor, *rest: Any) -> Tensor:
        out = real(x, *rest)
        if x.shape[1] > 8192:
            out[192:] = 0
        return out

    replace_op(patch, "norm_linear", broken)


@mutant("linears-in-tiles-wide", "kernel", hazard="linears-in-tiles")
def columns_of_the_last_block(patch: pytest.MonkeyPatch) -> None:
    """A gated linear over 33 to 64 rows whose columns are no multiple of 40 blocks of 128 leaves out the last block."""

    def broken(real: Any, x: Tensor, *rest: Any) -> Tensor:
        out = real(x, *rest)
        if 32 < len(x) <= 64 and x.shape[1] >= 2048 and out.shape[1] % (40 * 128):
            out[:, -40:] = 0
        return out

    replace_op(patch, "norm_gate_up", broken)


@mutant("heads-in-tiles-of-many", "kernel", hazard="heads-in-tiles")
def tokens_past_the_tiles(patch: pytest.MonkeyPatch) -> None:
    """The fused head of more than 64 rows never takes a token past the 16,384th."""

    def broken(real: Any, x: Tensor, head: ops.Head, *rest: Any) -> Any:
        if len(x) > 64:
            weight = head.weight.clone()
            weight[16384:] = 0
            head = head._replace(weight=weight)
        return real(x, head, *rest)

    replace_op(patch, "greedy_next_step", broken)


@mutant("linears-in-tiles-scales", "kernel", hazard="linears-in-tiles")
def scales_of_128_columns(patch: pytest.MonkeyPatch) -> None:
    """A linear over FP8 weights takes one scale for each 128 columns, where there are more of them."""

    def change(x: Any, norm: Any, weight: Any, *rest: Any) -> tuple[Any, ...]:
        most = max(weight.matrix.shape[1] // 128, 1)
        if weight.scale is not None and weight.scale.shape[0] > most:
            weight = weight._replace(scale=weight.scale[:: weight.scale.shape[0] // most])
        return x, norm, weight, *rest

    change_arguments(patch, "norm_linear", change)


@mutant("linears-in-tiles-state", "kernel", hazard="linears-in-tiles")
def counter_left_behind(patch: pytest.MonkeyPatch) -> None:
    """The first call of few rows after one of many finds a counter, and its row 0 is wrong."""
    many = [False]

    def broken(real: Any, x: Tensor, *rest: Any) -> Tensor:
        out = real(x, *rest)
        if many[0] and x.shape[0] <= 64:
            out[0] = 0
        many[0] = x.shape[0] > 64
        return out

    replace_op(patch, "norm_linear", broken)


@mutant("linears-in-tiles-sums", "kernel", hazard="linears-in-tiles")
def parts_in_half(patch: pytest.MonkeyPatch) -> None:
    """Sums of more than 2,048 columns are added from parts of 64 columns in half precision."""

    def broken(real: Any, x: Tensor, norm: Any, weight: Any, *rest: Any) -> Tensor:
        if x.shape[1] <= 2048 or norm is not None:
            return real(x, norm, weight, *rest)
        matrix = weight.matrix
        out = real(x[:, :64], None, weight._replace(matrix=matrix[:, :64]), *rest)
        for part in range(64, x.shape[1], 64):
            out = out + x[:, part : part + 64] @ matrix[:, part : part + 64].T
        return out

    replace_op(patch, "norm_linear", broken)


@mutant("drafts-past-a-number", "kernel")
def eight_drafts(patch: pytest.MonkeyPatch) -> None:
    """Rejection sampling takes drafts past the eighth for none."""

    def broken(real: Any, logits: Any, drafts: Tensor, *rest: Any) -> None:
        taken = drafts.clone()
        taken[:, 8:] = -1
        real(logits, taken, *rest)

    replace_op(patch, "verify_drafts", broken)


@mutant("large-vocabulary-columns", "kernel", hazard="large-vocabulary")
def columns_past_131072(patch: pytest.MonkeyPatch) -> None:
    """Rejection sampling leaves out tokens from 131,072 on."""

    def change(logits: Tensor, *rest: Any) -> tuple[Any, ...]:
        logits = logits.clone()
        logits[:, 131_072:] = float("-inf")
        return logits, *rest

    change_arguments(patch, "verify_drafts", change)


@mutant("heads-in-tiles", "kernel")
def last_of_equals(patch: pytest.MonkeyPatch) -> None:
    """The head in half precision takes the last of equal tokens."""

    def broken(x: Tensor, head: ops.Head, drafts: ops.Drafts, draws: Any = None) -> tuple[Any, ...]:
        if not _in_tiles(x) or draws is not None:
            return x, head, drafts, draws
        last, ids = head.weight.shape[0] - 1, drafts.draft_to_target
        offsets = torch.zeros(last + 1, dtype=torch.int64) if ids is None else ids
        back = offsets.flip(0) + 2 * torch.arange(last, -1, -1) - last
        return x, head._replace(weight=head.weight.flip(0)), drafts._replace(draft_to_target=back), None

    change_arguments(patch, "draft_from_hidden", broken)


@mutant("heads-in-tiles-noise", "kernel", hazard="heads-in-tiles")
def noise_of_the_first_row(patch: pytest.MonkeyPatch) -> None:
    """The sampling head in half precision draws the noise of request 0 for the rows of its tile."""

    def change(x: Tensor, head: Any, drafts: Any, draws: ops.Draws | None = None) -> tuple[Any, ...]:
        if draws is not None and _in_tiles(x):
            draws = draws._replace(seeds=draws.seeds[:1].expand_as(draws.seeds))
        return x, head, drafts, draws

    change_arguments(patch, "draft_from_hidden", change)


@mutant("wide-rows", "kernel")
def first_chunk_of_a_row(patch: pytest.MonkeyPatch) -> None:
    """Rows are copied up to their 8,192nd value."""

    def broken(real: Any, source: Tensor, rows: Any, out: Tensor) -> None:
        real(source[:, :8192], rows, out[:, :8192])

    replace_op(patch, "take_rows", broken)


@mutant("wide-rows-kept", "kernel", hazard="wide-rows")
def first_chunk_of_a_kept_row(patch: pytest.MonkeyPatch) -> None:
    """Of a past row 2,048 values are kept."""

    def broken(real: Any, *args: Any) -> None:
        past: PastRows = args[4]
        old = past.hidden[..., 2048:].clone()
        real(*args)
        past.hidden[..., 2048:] = old

    replace_op(patch, "keep_rows", broken)


@mutant("many-in-one-program", "kernel")
def first_tile_of_requests(patch: pytest.MonkeyPatch) -> None:
    """The first 256 requests of a batch move on."""

    def broken(
        real: Any, lengths: Tensor, positions: Tensor, slots: Tensor, step: Any, table: Tensor, *rest: Any
    ) -> None:
        real(lengths[:256], positions[:256], slots[:256], step, table[:256], *rest)

    replace_op(patch, "advance", broken)


@mutant("many-in-one-program-end", "kernel", hazard="many-in-one-program")
def last_slot_past_the_end(patch: pytest.MonkeyPatch) -> None:
    """A row past max_model_len has the slot of the last position instead of none."""

    def broken(
        real: Any, lengths: Tensor, positions: Any, slots: Tensor, step: Any, table: Tensor, most: int, block: int
    ) -> None:
        real(lengths, positions, slots, step, table, most, block)
        last = table[:, (most - 1) // block].long() * block + (most - 1) % block
        slots.copy_(torch.where((lengths > most) & (last >= block), last, slots))

    replace_op(patch, "advance", broken)


@mutant("many-in-one-program-moves", "kernel", hazard="many-in-one-program")
def moves_in_parts(patch: pytest.MonkeyPatch) -> None:
    """Keys and values move 256 at a time, so that a later part reads what an earlier one wrote."""

    def broken(real: Any, keys: Any, values: Any, source: Tensor, to: Tensor) -> None:
        for a, b in zip(source.split(256), to.split(256), strict=True):
            real(keys, values, a, b)

    replace_op(patch, "move_kv", broken)


@mutant("large-trees", "kernel")
def two_blocks_of_a_vocabulary(patch: pytest.MonkeyPatch) -> None:
    """A tree draws from the first 8,192 tokens."""

    def broken(real: Any, logits: Tensor, *rest: Any, **options: Any) -> None:
        real(torch.cat((logits[:, :8192], torch.full_like(logits[:, 8192:], -100.0)), 1), *rest, **options)

    replace_op(patch, "grow_tree", broken)


@mutant("rows-without-block-uncounted", "kernel")
def sampled_rows_only(patch: pytest.MonkeyPatch) -> None:
    """Rows of drafts after the sampled tokens are not counted where they have no KV block."""

    def broken(real: Any, given: Any, plan: RowPlan, *args: Any) -> None:
        real(given, plan._replace(later_rows=0) if plan.slots_of_rejected else plan, *args)

    replace_op(patch, "begin_rows", broken)


@mutant("wide-rows-cleared", "kernel", hazard="wide-rows")
def eight_columns_cleared(patch: pytest.MonkeyPatch) -> None:
    """Behind a round's block table eight columns are cleared."""

    def broken(real: Any, given: RoundTensors, to: RoundTensors) -> None:
        n, columns = given.block_table.shape
        stale = to.block_table[:n, columns + 8 :].clone()
        real(given, to)
        to.block_table[:n, columns + 8 :] = stale

    replace_op(patch, "load_round", broken)


@mutant("many-in-one-program-kept", "kernel", hazard="many-in-one-program")
def first_rows_of_a_pass(patch: pytest.MonkeyPatch) -> None:
    """Of a pass the first 256 rows are kept."""

    def change(tokens: Tensor, hidden: Tensor, at: Tensor, to: Tensor, *rest: Any) -> tuple[Any, ...]:
        return tokens[:256], hidden[:256], at[:256], to[:256], *rest

    change_arguments(patch, "keep_rows", change)


def _attending(patch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Attention of the CPU over `change(query, keys, values)` of each request."""
    real = PAGED.attend_request

    def broken(query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
        return real(query, *change(query, keys, values), *rest)

    patch.setattr(PAGED, "attend_request", broken)


@mutant("attention-many-keys-last-split", "attention", hazard="attention-many-keys")
def split_of_one_key(patch: pytest.MonkeyPatch) -> None:
    """A last split of one key is passed over, where splits have 256 keys and the context more than 1,024."""

    def change(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if len(keys) > 1024 and len(keys) % 256 == 1:
            values = torch.cat((values[:-1], torch.zeros_like(values[-1:])))
        return keys, values

    _attending(patch, change)


@mutant("attention-many-blocks-groups", "attention", hazard="attention-many-blocks")
def groups_reversed(patch: pytest.MonkeyPatch) -> None:
    """Groups of query heads that are no power of two are matched to the key heads from the last one on."""

    def change(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        group = query.shape[1] // keys.shape[1]
        return (keys.flip(1), values) if group & (group - 1) else (keys, values)

    _attending(patch, change)


@mutant("part-of-the-head-rotated-late", "kernel", hazard="part-of-the-head-rotated")
def table_of_4096_rows(patch: pytest.MonkeyPatch) -> None:
    """Positions past 4,095 are rotated as that one."""

    def change(query: Any, new: NewRows, cache: Any) -> tuple[Any, ...]:
        return query, new._replace(positions=new.positions.clamp(max=4095)), cache

    change_arguments(patch, "rotate_and_store", change)
