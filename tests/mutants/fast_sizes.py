"""Bugs of kernels that devices take for some sizes only: passed by suite 1.3, whose sizes reach plain torch there."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from mutants.registry import mutant
from torch import Tensor

from specgraph import ops
from specgraph.ops import NewRows
from specgraph.ops.begin_rows import RowPlan
from specgraph.ops.copies import BatchTensors
from specgraph.ops.past_rows import PastRows

HALVES = (torch.bfloat16, torch.float16)
PAGED: Any = import_module("specgraph.ops.paged_attention")
"""The module: `specgraph.ops` has an op of its name."""


def _in_tiles(x: Tensor) -> bool:
    return x.dtype in HALVES and x.shape[1] % 128 == 0


@mutant("linears-in-tiles", "specgraph_models.ops:linear_norm_linear")
def without_eps(real: Any, x: Tensor, weight: Any, residual: Any, norm: Any, following: Any) -> Any:
    """The kernel of two linears in half precision has no eps in the norm between them."""
    return real(x, weight, residual, norm._replace(eps=0.0) if _in_tiles(x) else norm, following)


@mutant("linears-in-tiles-columns", "specgraph_models.ops:norm_gate_up")
def columns_past_the_tiles(real: Any, x: Tensor, *rest: Any) -> Tensor:
    """A gated linear of more than 13,312 columns leaves out those past them."""
    out = real(x, *rest)
    out[:, 13312:] = 0
    return out


@mutant("linears-in-tiles-rows", "specgraph.ops:norm_linear")
def rows_past_the_blocks(real: Any, x: Tensor, *rest: Any) -> Tensor:
    """A linear over more than 64 rows of more than 8,192 columns leaves out rows past the 192nd."""
    out = real(x, *rest)
    if x.shape[1] > 8192:
        out[192:] = 0
    return out


@mutant("linears-in-tiles-wide", "specgraph_models.ops:norm_gate_up")
def columns_of_the_last_block(real: Any, x: Tensor, *rest: Any) -> Tensor:
    """A gated linear over 33 to 64 rows whose columns are no multiple of 40 blocks of 128 leaves out the last block."""
    out = real(x, *rest)
    if 32 < len(x) <= 64 and x.shape[1] >= 2048 and out.shape[1] % (40 * 128):
        out[:, -40:] = 0
    return out


@mutant("heads-in-tiles-of-many", "specgraph.ops:greedy_next_step")
def tokens_past_the_tiles(real: Any, x: Tensor, head: ops.LmHead, *rest: Any) -> Any:
    """The fused head of more than 64 rows never takes a token past the 16,384th."""
    if len(x) > 64:
        weight = head.weight.clone()
        weight[16384:] = 0
        head = head._replace(weight=weight)
    return real(x, head, *rest)


@mutant("linears-in-tiles-scales", "specgraph.ops:norm_linear")
def scales_of_128_columns(real: Any, x: Any, norm: Any, weight: Any, *rest: Any) -> Any:
    """A linear over FP8 weights takes one scale for each 128 columns, where there are more of them."""
    most = max(weight.matrix.shape[1] // 128, 1)
    if weight.scale is not None and weight.scale.shape[0] > most:
        weight = weight._replace(scale=weight.scale[:: weight.scale.shape[0] // most])
    return real(x, norm, weight, *rest)


@mutant("linears-in-tiles-state", "specgraph.ops:norm_linear")
def counter_left_behind(real: Any, x: Tensor, *rest: Any, many: list[bool] = [False]) -> Tensor:  # noqa: B006 (kept)
    """The first call of few rows after one of many finds a counter, and its row 0 is wrong."""
    out = real(x, *rest)
    if many[0] and x.shape[0] <= 64:
        out[0] = 0
    many[0] = x.shape[0] > 64
    return out


@mutant("linears-in-tiles-sums", "specgraph.ops:norm_linear")
def parts_in_half(real: Any, x: Tensor, norm: Any, weight: Any, *rest: Any) -> Tensor:
    """Sums of more than 2,048 columns are added from parts of 64 columns in half precision."""
    if x.shape[1] <= 2048 or norm is not None:
        return real(x, norm, weight, *rest)
    matrix = weight.matrix
    out = real(x[:, :64], None, weight._replace(matrix=matrix[:, :64]), *rest)
    for part in range(64, x.shape[1], 64):
        out = out + x[:, part : part + 64] @ matrix[:, part : part + 64].T
    return out


@mutant("drafts-past-a-number", "specgraph_run.decoder.ops:verify_drafts")
def eight_drafts(real: Any, logits: Any, drafts: Tensor, *rest: Any) -> None:
    """Rejection sampling takes drafts past the eighth for none."""
    taken = drafts.clone()
    taken[:, 8:] = -1
    real(logits, taken, *rest)


@mutant("large-vocabulary-columns", "specgraph_run.decoder.ops:verify_drafts")
def columns_past_131072(real: Any, logits: Tensor, *rest: Any) -> Any:
    """Rejection sampling leaves out tokens from 131,072 on."""
    logits = logits.clone()
    logits[:, 131_072:] = float("-inf")
    return real(logits, *rest)


@mutant("heads-in-tiles", "specgraph.ops:draft_from_hidden")
def last_of_equals(real: Any, x: Tensor, head: ops.LmHead, drafts: ops.Drafts, draws: Any = None) -> Any:
    """The head in half precision takes the last of equal tokens."""
    if not _in_tiles(x) or draws is not None:
        return real(x, head, drafts, draws)
    last, ids = head.weight.shape[0] - 1, drafts.draft_to_target
    offsets = torch.zeros(last + 1, dtype=torch.int64) if ids is None else ids
    back = offsets.flip(0) + 2 * torch.arange(last, -1, -1) - last
    return real(x, head._replace(weight=head.weight.flip(0)), drafts._replace(draft_to_target=back), None)


@mutant("heads-in-tiles-noise", "specgraph.ops:draft_from_hidden")
def noise_of_the_first_row(real: Any, x: Tensor, head: Any, drafts: Any, draws: ops.Draws | None = None) -> Any:
    """The sampling head in half precision draws the noise of request 0 for the rows of its tile."""
    if draws is not None and _in_tiles(x):
        draws = draws._replace(seeds=draws.seeds[:1].expand_as(draws.seeds))
    return real(x, head, drafts, draws)


@mutant("wide-rows", "specgraph.ops:take_rows")
def first_chunk_of_a_row(real: Any, source: Tensor, rows: Any, out: Tensor) -> None:
    """Rows are copied up to their 8,192nd value."""
    real(source[:, :8192], rows, out[:, :8192])


@mutant("wide-rows-kept", "specgraph.ops:keep_rows")
def first_chunk_of_a_kept_row(real: Any, *args: Any) -> None:
    """A past row keeps its first 2,048 values."""
    past: PastRows = args[4]
    old = past.hidden[..., 2048:].clone()
    real(*args)
    past.hidden[..., 2048:] = old


@mutant("many-in-one-program", "specgraph.ops:advance")
def first_tile_of_requests(
    real: Any, lengths: Tensor, positions: Tensor, slots: Tensor, step: Any, table: Tensor, *rest: Any
) -> None:
    """The first 256 requests of a batch move on."""
    real(lengths[:256], positions[:256], slots[:256], step, table[:256], *rest)


@mutant("many-in-one-program-end", "specgraph.ops:advance")
def last_slot_past_the_end(
    real: Any, lengths: Tensor, positions: Any, slots: Tensor, step: Any, table: Tensor, most: int, block: int
) -> None:
    """A row past max_model_len has the slot of the last position instead of none."""
    real(lengths, positions, slots, step, table, most, block)
    last = table[:, (most - 1) // block].long() * block + (most - 1) % block
    slots.copy_(torch.where((lengths > most) & (last >= block), last, slots))


@mutant("many-in-one-program-moves", "specgraph_run.decoder.ops:move_kv")
def moves_in_parts(real: Any, keys: Any, values: Any, source: Tensor, to: Tensor) -> None:
    """Keys and values move 256 at a time, so that a later part reads what an earlier one wrote."""
    for a, b in zip(source.split(256), to.split(256), strict=True):
        real(keys, values, a, b)


@mutant("large-trees", "specgraph.ops:grow_tree")
def two_blocks_of_a_vocabulary(real: Any, logits: Tensor, *rest: Any, **options: Any) -> None:
    """A tree draws from the first 8,192 tokens."""
    real(torch.cat((logits[:, :8192], torch.full_like(logits[:, 8192:], -100.0)), 1), *rest, **options)


@mutant("rows-without-block-uncounted", "specgraph.ops:begin_rows")
def sampled_rows_only(real: Any, given: Any, plan: RowPlan, *args: Any) -> None:
    """Rows of drafts after the sampled tokens are not counted where they have no KV block."""
    real(given, plan._replace(rows_behind=0) if plan.slots_of_rejected else plan, *args)


@mutant("wide-rows-cleared", "specgraph.ops:load_batch")
def eight_columns_cleared(real: Any, given: BatchTensors, to: BatchTensors) -> None:
    """Behind a round's block table eight columns are cleared."""
    n, columns = given.block_table.shape
    stale = to.block_table[:n, columns + 8 :].clone()
    real(given, to)
    to.block_table[:n, columns + 8 :] = stale


@mutant("many-in-one-program-kept", "specgraph.ops:keep_rows")
def first_rows_of_a_pass(real: Any, tokens: Tensor, hidden: Tensor, at: Tensor, to: Tensor, *rest: Any) -> Any:
    """A pass keeps its first 256 rows."""
    return real(tokens[:256], hidden[:256], at[:256], to[:256], *rest)


@mutant("attention-many-keys-last-split", "specgraph.ops.paged_attention:attend_request")
def split_of_one_key(real: Any, query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
    """A last split of one key is passed over, where splits have 256 keys and the context more than 1,024."""
    if len(keys) > 1024 and len(keys) % 256 == 1:
        values = torch.cat((values[:-1], torch.zeros_like(values[-1:])))
    return real(query, keys, values, *rest)


@mutant("attention-many-blocks-groups", "specgraph.ops.paged_attention:attend_request")
def groups_reversed(real: Any, query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
    """Groups of query heads that are no power of two are matched to the key heads from the last one on."""
    group = query.shape[1] // keys.shape[1]
    return real(query, keys.flip(1) if group & (group - 1) else keys, values, *rest)


@mutant("part-of-the-head-rotated-late", "specgraph.ops:rotate_and_store")
def table_of_4096_rows(real: Any, query: Any, new: NewRows, cache: Any) -> Any:
    """Positions past 4,095 are rotated as that one."""
    return real(query, new._replace(positions=new.positions.clamp(max=4095)), cache)
