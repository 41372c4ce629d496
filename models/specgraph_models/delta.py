"""Gated delta nets (arXiv:2412.06464) in place of a layer's attention: Qwen3-Next and Qwen3.5.

A request has one state of fixed size per layer, in place of keys and values per token: `specgraph_models.ops.delta`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specgraph_models import ops
from specgraph_models.ops.delta import DeltaWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """The sizes of one layer. Value head h belongs to key head h * key_heads // value_heads."""

    key_heads: int
    value_heads: int
    key_size: int
    """Elements of one query, and of one key."""
    value_size: int
    """Elements of one value."""
    kernel: int
    """Rows that the convolution sees, the row itself included."""

    @property
    def keys(self) -> int:
        """The channels of all queries, and those of all keys."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """The channels of all values."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The weights of one layer, besides its packed projection and its output projection.

    The packed projection's rows are query, key, value, gate of the output, logits of beta, inputs of the decay.
    """

    config: DeltaConfig
    weights: DeltaWeights
    norm: Tensor
    """[value_size]: the norm of each head's output."""


class Recur(Protocol):
    """The callable that a model uses in its recurrent layers: it runs the rows of a pass through requests' states."""

    def __call__(self, index: int, mixed: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        """Run one layer. `index` counts recurrent layers from 0. Shapes as in `ops.gated_delta_rule`."""
        ...


def delta_heads(projected: Tensor, net: DeltaNet, index: int, recur: Recur, eps: float) -> Tensor:
    """Return the normalised and gated heads [T, values] of the packed projection [T, rows]."""
    sizes = net.config
    split = sizes.channels, sizes.values, 2 * sizes.value_heads
    mixed, gate, gates = projected.split(split, dim=-1)
    return ops.gated_norm(recur(index, mixed, gates, net.weights), gate, net.norm, eps)
