"""The implementations of the ops of models."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from torch import Tensor

from specgraph.kernels.implement import Kernels
from specgraph.ops.linear import PairInput, Weight
from specgraph_models.kernels.trial import gated_linear
from specgraph_models.kernels.two_linears import TwoLinearOps
from specgraph_models.ops.experts import grouped_expert_mlp


class ModelOps(TwoLinearOps):
    """Launchers of the ops of models."""

    __slots__ = ()

    def pair_linear(self, token_ids: Tensor, hidden: Tensor, pair: PairInput, weight: Weight) -> Tensor:
        return self.norm_linear(self._pair(token_ids, hidden, pair), None, weight)


KERNELS = Kernels(ModelOps, gated_linear, {"expert_mlp": grouped_expert_mlp})  # torch's own ops
