"""Triton kernels of the ops of models, and the calls that try them on a device.

The modules here need `triton`; models do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from specgraph.ops.linear import Norm, Weight
from specgraph_models.ops.delta import DeltaState, DeltaWeights, StateRows


def model_ops() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ops of models with arguments: a gated linear, and a gated delta net over three requests, the last inert."""
    g = torch.Generator().manual_seed(0)
    x, norm, weight = (torch.randn(shape, generator=g).to(torch.bfloat16) for shape in ((6, 64), (64,), (192, 64)))
    yield "norm_gate_up", {"x": x, "norm": Norm(norm, 1e-6), "weight": Weight(weight / 8)}
    mixed, gates = torch.randn(6, 96, generator=g).to(torch.bfloat16), torch.randn(6, 8, generator=g)
    weights = DeltaWeights(torch.randn(96, 4, generator=g) / 2, -torch.rand(4, generator=g), torch.zeros(4))
    shapes = (3, 4, 16, 8), (3, 4, 2, 16), (3, 4, 4, 8), (3, 4, 4)
    state, keys, updates, decays = (torch.randn(shape, generator=g) for shape in shapes)
    window = torch.randn(3, 5, 96, generator=g).to(torch.bfloat16)
    at = StateRows(*(torch.tensor(each) for each in ([7, 3, -1], [2, 2, 0], [2, 1, 0], [2, 0, 0])))
    for commits in (False, True):
        yield (
            "gated_delta_rule",
            {
                "mixed": mixed,
                "gates": gates.to(torch.bfloat16),
                "weights": weights._replace(conv=weights.conv.to(torch.bfloat16)),
                "state": DeltaState(state, keys, updates, -decays.abs(), window),
                "at": at,
                "commits": commits,
            },
        )
    x, weight = torch.randn(6, 4, 8, generator=g).to(torch.bfloat16), torch.ones(8)
    yield "gated_norm", {"x": x, "gate": mixed[:, :32], "weight": weight, "eps": 1e-6}
