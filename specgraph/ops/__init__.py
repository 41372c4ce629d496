"""The draft ops: registered torch ops, each declared by a reference in plain torch that any device can capture."""

from specgraph.ops.begin import begin_block, begin_masked, begin_prefill, begin_propose, begin_verify
from specgraph.ops.collectives import all_gather, all_reduce, best_tokens, draft_best, embed_part, verify_best
from specgraph.ops.copies import load_round, take_rows
from specgraph.ops.draft_sampling import draft_block_greedy, draft_block_gumbel, draft_greedy, draft_gumbel
from specgraph.ops.experts import expert_mlp
from specgraph.ops.kv_cache import KVCache, NewRows, rotate_and_store
from specgraph.ops.library import implement
from specgraph.ops.linear import (
    Norm,
    PairInput,
    Weight,
    greedy_block_head,
    greedy_head,
    gumbel_head,
    norm_gate_up,
    norm_linear,
    pair_linear,
)
from specgraph.ops.next_step import greedy_next_step
from specgraph.ops.paged_attention import DeviceLengths, HostLengths, Mask, paged_attention, paged_attention_host
from specgraph.ops.past_rows import begin_modules, keep_rows
from specgraph.ops.rejection import verify_greedy, verify_sampled, verify_synthetic
from specgraph.ops.round_state import next_verify, publish_round, stop_finished
from specgraph.ops.sampling_parameters import adjust_logits, count_tokens, emitted_logprobs
from specgraph.ops.slots import advance, shift_token_ids
from specgraph.ops.tree import advance_tree, choose_nodes, draft_block_tree, grow_tree
from specgraph.ops.tree_verify import begin_tree_verify, move_kv, verify_tree, verify_tree_synthetic
from specgraph.ops.two_linears import linear_norm_gate_up, linear_norm_linear

__all__ = [
    "DeviceLengths",
    "HostLengths",
    "KVCache",
    "Mask",
    "NewRows",
    "Norm",
    "PairInput",
    "Weight",
    "adjust_logits",
    "advance",
    "advance_tree",
    "all_gather",
    "all_reduce",
    "begin_block",
    "begin_masked",
    "begin_modules",
    "begin_prefill",
    "begin_propose",
    "begin_tree_verify",
    "begin_verify",
    "best_tokens",
    "choose_nodes",
    "count_tokens",
    "draft_best",
    "draft_block_greedy",
    "draft_block_gumbel",
    "draft_block_tree",
    "draft_greedy",
    "draft_gumbel",
    "embed_part",
    "emitted_logprobs",
    "expert_mlp",
    "greedy_block_head",
    "greedy_head",
    "greedy_next_step",
    "grow_tree",
    "gumbel_head",
    "implement",
    "keep_rows",
    "linear_norm_gate_up",
    "linear_norm_linear",
    "load_round",
    "move_kv",
    "next_verify",
    "norm_gate_up",
    "norm_linear",
    "paged_attention",
    "paged_attention_host",
    "pair_linear",
    "publish_round",
    "rotate_and_store",
    "shift_token_ids",
    "stop_finished",
    "take_rows",
    "verify_best",
    "verify_greedy",
    "verify_sampled",
    "verify_synthetic",
    "verify_tree",
    "verify_tree_synthetic",
]
