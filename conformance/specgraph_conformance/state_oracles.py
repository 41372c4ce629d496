"""Gated delta nets of one request in float64, row by row from zeros: the formulas of arXiv:2412.06464."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from specgraph_models.delta import DeltaConfig
from specgraph_models.ops.delta import L2_EPS, DeltaWeights
from torch import Tensor


@dataclass
class DenseState:
    """One layer's state of one request, and all inputs of its convolution so far."""

    sizes: DeltaConfig
    state: Tensor = field(init=False)
    """float64 [HV, DK, DV]"""
    inputs: list[Tensor] = field(default_factory=list[Tensor])
    """The rows of `mixed` so far, float64 [C] each."""

    def __post_init__(self) -> None:
        sizes = self.sizes
        self.state = torch.zeros(sizes.value_heads, sizes.key_size, sizes.value_size, dtype=torch.float64)

    def run(self, mixed: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        """Run rows mixed [T, C] and gates [T, 2 * HV]; return the heads [T, HV, DV] in float64."""
        return torch.stack([self._row(x.double(), g.double(), weights) for x, g in zip(mixed, gates, strict=True)])

    def _row(self, mixed: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        sizes = self.sizes
        self.inputs.append(mixed)
        taps = weights.conv.double()
        total = torch.zeros_like(mixed)
        for back, earlier in enumerate(reversed(self.inputs[-sizes.kernel :])):
            total = total + taps[:, sizes.kernel - 1 - back] * earlier
        total = total * torch.sigmoid(total)
        query, key, value = total.split((sizes.keys, sizes.keys, sizes.values))
        b, a = gates.view(2, sizes.value_heads)
        heads = torch.arange(sizes.value_heads) // (sizes.value_heads // sizes.key_heads)
        q, k = (x.view(sizes.key_heads, -1)[heads] for x in (query, key))
        q, k = (x / (x.square().sum(1, keepdim=True) + L2_EPS).sqrt() for x in (q, k))
        decay = weights.decay.double() * torch.log1p(torch.exp(a + weights.dt_bias.double()))
        kept = self.state * decay.exp().view(-1, 1, 1)
        seen = torch.einsum("hkv,hk->hv", kept, k)
        update = (value.view(sizes.value_heads, -1) - seen) * torch.sigmoid(b)[:, None]
        self.state = kept + torch.einsum("hk,hv->hkv", k, update)
        return torch.einsum("hkv,hk->hv", self.state, q) * sizes.key_size**-0.5


class DenseStates:
    """The states of all recurrent layers of one request. `recur` is the callable that the target takes."""

    def __init__(self, layers: tuple[DeltaConfig, ...]) -> None:
        self.layers = [DenseState(layer) for layer in layers]

    def recur(self, index: int, mixed: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        """See `specgraph_models.delta.Recur`."""
        return self.layers[index].run(mixed, gates, weights).to(mixed.dtype)
