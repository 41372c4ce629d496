"""The draft ops, each a registered torch op with a capturable reference."""

from specgraph.kernels.begin import begin_propose, begin_verify
from specgraph.kernels.block import begin_block, draft_block_greedy, draft_block_gumbel
from specgraph.kernels.decoder import greedy_head, norm_gate_up, norm_linear, pair_linear
from specgraph.kernels.draft_sampling import draft_greedy, draft_gumbel
from specgraph.kernels.fused_attention import rotate_store_attend
from specgraph.kernels.kv_cache import rotate_and_store
from specgraph.kernels.library import implement
from specgraph.kernels.load import load_round
from specgraph.kernels.paged_attention import paged_attention, paged_attention_host
from specgraph.kernels.prompt import begin_prefill
from specgraph.kernels.rejection import verify_greedy, verify_sampled
from specgraph.kernels.shift import shift_token_ids
from specgraph.kernels.slots import advance
from specgraph.kernels.synthetic import verify_synthetic
from specgraph.kernels.take_rows import take_rows

__all__ = [
    "advance",
    "begin_block",
    "begin_prefill",
    "begin_propose",
    "begin_verify",
    "draft_block_greedy",
    "draft_block_gumbel",
    "draft_greedy",
    "draft_gumbel",
    "greedy_head",
    "implement",
    "load_round",
    "norm_gate_up",
    "norm_linear",
    "paged_attention",
    "paged_attention_host",
    "pair_linear",
    "rotate_and_store",
    "rotate_store_attend",
    "shift_token_ids",
    "take_rows",
    "verify_greedy",
    "verify_sampled",
    "verify_synthetic",
]
