"""The ops of models alone, declared as the draft ops are, and where their Triton kernels are."""

from specgraph.models.ops.embedding import embed_part, pair_linear
from specgraph.models.ops.experts import expert_mlp
from specgraph.models.ops.linear import linear_norm_gate_up, linear_norm_linear, norm_gate_up
from specgraph.ops.library import name_kernels

name_kernels("specgraph.models.kernels.implement:KERNELS")

__all__ = ["embed_part", "expert_mlp", "linear_norm_gate_up", "linear_norm_linear", "norm_gate_up", "pair_linear"]
