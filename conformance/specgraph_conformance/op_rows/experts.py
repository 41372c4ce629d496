"""Rows of the mixture of experts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from specgraph.ops import Weight
from specgraph_models import ops as model_ops
from specgraph_models.experts import Experts, ExpertsConfig, route
from torch import Generator, Tensor

from specgraph_conformance.linear_oracles import TOLERANCE, normal
from specgraph_conformance.op_table import FLOATS, Run, Table, expect_reference
from specgraph_conformance.rig import expect_close

TABLE = Table()
SIZE, INNER, ALPHA = 64, 32, 1.7


class Mixture(NamedTuple):
    """The inputs of a mixture of experts: rows, the experts chosen for each row, and the experts' weights."""

    x: Tensor
    ids: Tensor
    shares: Tensor
    gate_up: Weight
    down: Weight

    def part(self, first: int, count: int) -> Mixture:
        """Return the mixture with only `count` experts, from expert `first` on."""
        own = [Weight(w.matrix[first : first + count], w.bias[first : first + count] if w.bias is not None else None)
               for w in (self.gate_up, self.down)]  # fmt: skip
        return self._replace(gate_up=own[0], down=own[1])


def make(g: Generator, dtype: torch.dtype, rows: int, experts: int, top_k: int, biases: bool, chosen: int) -> Mixture:
    """Make a mixture. Its rows choose among the first `chosen` experts."""
    ids = torch.stack([torch.randperm(chosen, generator=g)[:top_k] for _ in range(rows)])
    gate_up = normal(g, (experts, 2 * INNER, SIZE), dtype, 0.4 if biases else 0.2)
    down = normal(g, (experts, SIZE, INNER), dtype, 0.15)
    added = [normal(g, (experts, n), dtype) if biases else None for n in (2 * INNER, SIZE)]
    weights = Weight(gate_up, added[0]), Weight(down, added[1])
    return Mixture(normal(g, (rows, SIZE), dtype), ids, torch.rand(rows, top_k, generator=g), *weights)


@TABLE.row(
    "expert-mlp",
    "A mixture of experts gives float64's weighted sum of the chosen experts, with and without biases and the clamped "
    "activation of gpt-oss, also where some are chosen by no row.",
    cause="expert_mlp: rows that go to a neighbour's expert, a bias of another expert, a gate that is clamped below, "
    "weights that are made to add up to 1, or counts baked into a graph",
    dtype=FLOATS,
    limit={"plain": 0.0, "clamped": 2.0},
    rows=[1, 37],
)
def expert_mlp(run: Run, g: Generator, dtype: torch.dtype, limit: float, rows: int) -> None:
    for experts, top_k in ((6, 2), (150, 4), (1, 1)):
        mixture = make(g, dtype, rows, experts, top_k, biases=limit > 0, chosen=max(experts - 2, 1))
        expect_reference(run, model_ops.expert_mlp, *mixture, alpha=ALPHA, limit=limit, tolerance=TOLERANCE[dtype])


@TABLE.row(
    "expert-mlp-parts",
    "Parts of the experts, each given all rows, add up to float64's mixture; experts elsewhere add nothing.",
    cause="expert_mlp: ids counted from the wrong first expert, or rows of no expert here that are not zero",
    dtype=FLOATS,
    parts=[2, 3],
)
def expert_mlp_parts(run: Run, g: Generator, dtype: torch.dtype, parts: int) -> None:
    whole = make(g, dtype, 9, 6, 2, biases=True, chosen=6)
    whole.ids[0] = torch.tensor([0, 1])  # a row without an expert in the other parts
    count, total = 6 // parts, torch.zeros(9, SIZE, dtype=torch.float64)
    for first in range(0, 6, count):
        given = *whole.part(first, count), ALPHA, 0.0, first
        seen = expect_reference(run, model_ops.expert_mlp, *given, tolerance=TOLERANCE[dtype])
        assert not first or not seen[0].any(), "a row that has no expert here"
        total += seen.double()
    expect_close(total, model_ops.expert_mlp.reference(*whole, ALPHA).double(), 2 * TOLERANCE[dtype], "their sum")


@TABLE.row(
    "experts-of-the-best-groups",
    "A router that chooses among the groups of experts with the best two scores gives float64's experts and weights, "
    "also where every corrected score is negative.",
    hazard="expert-groups-masked-with-zero",
    cause="route: experts outside of the best groups get a score of 0, which is more than a negative one",
    correction=[0.0, -2.0],
)
def best_groups(run: Run, g: Generator, correction: float) -> None:
    rows, experts, groups, top_groups, top_k = 9, 12, 4, 2, 5
    config = ExpertsConfig(
        num_experts=experts, top_k=top_k, inner=INNER, layers=(True,), scoring="sigmoid", num_groups=groups,
        top_groups=top_groups,
    )  # fmt: skip
    x, router = normal(g, (rows, SIZE)), normal(g, (experts, SIZE), scale=SIZE**-0.5)
    added = normal(g, (experts,), scale=0.1) + correction

    def routed(x: Tensor, router: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        return route(x, Experts(config, router, correction=correction))

    ids, weights = run(routed, x, router, added)
    scores = (x.double() @ router.double().T).sigmoid()
    for row, corrected in enumerate((scores + added.double()).view(rows, groups, -1)):
        best = corrected.sort(-1).values[:, -2:].sum(-1).argsort()[-top_groups:]
        allowed = [expert for expert in range(experts) if expert // (experts // groups) in best.tolist()]
        wanted = sorted(allowed, key=lambda expert: float(corrected.flatten()[expert]))[-top_k:]
        assert sorted(ids[row].tolist()) == sorted(wanted), f"row {row} goes to experts {ids[row].tolist()}"
        chosen = scores[row, ids[row]]
        expect_close(weights[row], chosen / chosen.sum(), 1e-5, f"weights of row {row}")
