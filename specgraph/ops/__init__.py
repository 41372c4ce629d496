"""The draft ops: registered torch ops, each declared by a reference in plain torch that any device can capture."""

from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows, begin_rows
from specgraph.ops.collectives import all_gather, all_reduce, best_of, best_tokens, embed_part
from specgraph.ops.context_parallel import attend_part, attend_part_host, sum_parts
from specgraph.ops.copies import load_round, next_verify, take_rows
from specgraph.ops.draft_sampling import (
    Drafts,
    Draws,
    LmHead,
    draft_from_hidden,
    draft_from_logits,
    greedy_next_step,
    write_drafts,
)
from specgraph.ops.experts import expert_mlp
from specgraph.ops.kv_cache import KVCache, NewRows, rotate_and_store
from specgraph.ops.library import implement
from specgraph.ops.linear import (
    Norm,
    PairInput,
    Weight,
    linear_norm_gate_up,
    linear_norm_linear,
    norm_gate_up,
    norm_linear,
    pair_linear,
)
from specgraph.ops.ngram import keep_tokens, ngram_propose
from specgraph.ops.paged_attention import DeviceLengths, HostLengths, Mask, paged_attention, paged_attention_host
from specgraph.ops.past_rows import keep_rows
from specgraph.ops.ragged import RaggedRows, begin_ragged_rows
from specgraph.ops.rejection import Acceptance, Sampled, accept_greedy, verify_drafts
from specgraph.ops.sampling_parameters import SamplingParameters, adjust_logits, count_tokens, emitted_logprobs
from specgraph.ops.slots import advance, shift_token_ids
from specgraph.ops.tree import Beams, Candidates, TreeNodes, advance_tree, choose_nodes, draft_block_tree, grow_tree
from specgraph.ops.tree_verify import AcceptedPath, move_kv, verify_tree

__all__ = [
    "Acceptance",
    "AcceptedPath",
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
    "RaggedRows",
    "RowInputs",
    "RowPlan",
    "Rows",
    "Sampled",
    "SamplingParameters",
    "TreeNodes",
    "Weight",
    "accept_greedy",
    "adjust_logits",
    "advance",
    "advance_tree",
    "all_gather",
    "all_reduce",
    "attend_part",
    "attend_part_host",
    "begin_ragged_rows",
    "begin_rows",
    "best_of",
    "best_tokens",
    "choose_nodes",
    "count_tokens",
    "draft_block_tree",
    "draft_from_hidden",
    "draft_from_logits",
    "embed_part",
    "emitted_logprobs",
    "expert_mlp",
    "greedy_next_step",
    "grow_tree",
    "implement",
    "keep_rows",
    "keep_tokens",
    "linear_norm_gate_up",
    "linear_norm_linear",
    "load_round",
    "move_kv",
    "next_verify",
    "ngram_propose",
    "norm_gate_up",
    "norm_linear",
    "paged_attention",
    "paged_attention_host",
    "pair_linear",
    "rotate_and_store",
    "shift_token_ids",
    "sum_parts",
    "take_rows",
    "verify_drafts",
    "verify_tree",
    "write_drafts",
]
