"""The ops that only models use. They are declared as the draft ops are, and name their Triton kernels."""

from specgraph.ops.library import name_kernels
from specgraph_models.ops.blocks import (
    Shortlist,
    convolve_and_norm,
    convolve_blocks,
    draft_from_shortlist,
    next_state,
    silu_of_sum,
    top_logits,
)
from specgraph_models.ops.delta import find_states, gated_delta_rule, gated_norm
from specgraph_models.ops.experts import expert_mlp
from specgraph_models.ops.linear import embed_part, linear_norm_gate_up, linear_norm_linear, norm_gate_up, pair_linear

name_kernels("specgraph_models.kernels.implement:KERNELS")

__all__ = [
    "Shortlist",
    "convolve_and_norm",
    "convolve_blocks",
    "draft_from_shortlist",
    "embed_part",
    "expert_mlp",
    "find_states",
    "gated_delta_rule",
    "gated_norm",
    "linear_norm_gate_up",
    "linear_norm_linear",
    "next_state",
    "norm_gate_up",
    "pair_linear",
    "silu_of_sum",
    "top_logits",
]
