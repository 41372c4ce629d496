"""The implementations of the models' ops on devices that Triton compiles for."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from specgraph.kernels.implement import Kernels
from specgraph_models.kernels import model_ops
from specgraph_models.kernels.linears import ModelOps
from specgraph_models.ops.experts import grouped_expert_mlp

KERNELS = Kernels(ModelOps, model_ops, {"expert_mlp": grouped_expert_mlp})  # torch's own ops
