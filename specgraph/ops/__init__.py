"""The draft ops: registered torch ops. Each has a reference in plain torch, which any device can capture."""

from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows, begin_rows
from specgraph.ops.collectives import all_gather, all_reduce, best_of, best_tokens
from specgraph.ops.context_parallel import attend_part, attend_part_host, sum_parts
from specgraph.ops.copies import load_batch, take_rows
from specgraph.ops.draft_sampling import (
    Drafts,
    Draws,
    LmHead,
    draft_from_hidden,
    draft_from_logits,
    greedy_next_step,
    write_drafts,
)
from specgraph.ops.kv_cache import KVCache, NewRows, rotate_and_store
from specgraph.ops.library import implement, name_kernels
from specgraph.ops.linear import Norm, PairInput, Weight, norm_linear
from specgraph.ops.ngram import keep_tokens, ngram_propose
from specgraph.ops.paged_attention import DeviceLengths, HostLengths, Mask, paged_attention, paged_attention_host
from specgraph.ops.past_rows import keep_rows
from specgraph.ops.slots import advance, shift_token_ids
from specgraph.ops.tree import Beams, Candidates, TreeNodes, advance_tree, choose_nodes, draft_block_tree, grow_tree

name_kernels("specgraph.kernels.implement:KERNELS")

__all__ = [
    "Beams",
    "Candidates",
    "DeviceLengths",
    "Drafts",
    "Draws",
    "HostLengths",
    "KVCache",
    "LmHead",
    "Mask",
    "NewRows",
    "Norm",
    "PairInput",
    "RowInputs",
    "RowPlan",
    "Rows",
    "TreeNodes",
    "Weight",
    "advance",
    "advance_tree",
    "all_gather",
    "all_reduce",
    "attend_part",
    "attend_part_host",
    "begin_rows",
    "best_of",
    "best_tokens",
    "choose_nodes",
    "draft_block_tree",
    "draft_from_hidden",
    "draft_from_logits",
    "greedy_next_step",
    "grow_tree",
    "implement",
    "keep_rows",
    "keep_tokens",
    "load_batch",
    "ngram_propose",
    "norm_linear",
    "paged_attention",
    "paged_attention_host",
    "rotate_and_store",
    "shift_token_ids",
    "sum_parts",
    "take_rows",
    "write_drafts",
]
