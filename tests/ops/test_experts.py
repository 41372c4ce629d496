"""The mixture of experts by torch's grouped matmul: the rows of the op table in bfloat16."""

from __future__ import annotations

import pytest
import torch
from specgraph_conformance.op_rows import experts
from specgraph_conformance.op_run import run_on
from specgraph_models import ops
from specgraph_models.ops.experts import grouped_expert_mlp

from specgraph.cpu import CpuPlatform

SETS = [
    pytest.param(row, parameters, id=f"{row.case.id}[{id}]")
    for row in experts.TABLE.rows
    for id, parameters in row.parameter_sets()
    if parameters.get("dtype") is torch.bfloat16
]


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped matmul: the loop is taken")
@pytest.mark.parametrize(("row", "parameters"), SETS)
def test_grouped(row, parameters, monkeypatch):
    monkeypatch.setattr(grouped_expert_mlp, "reference", ops.expert_mlp.reference, raising=False)
    monkeypatch.setattr(ops, "expert_mlp", grouped_expert_mlp)
    row.check(run_on(CpuPlatform()), torch.Generator().manual_seed(0), **parameters)


def test_other_dtypes_are_left_to_the_reference():
    x = torch.zeros(2, 8)
    weight = experts.Weight(torch.zeros(1, 8, 8))
    assert grouped_expert_mlp(x, torch.zeros(2, 1).long(), torch.ones(2, 1), weight, weight) is NotImplemented
