"""Moving the rows of later draft steps on."""

from __future__ import annotations

import torch
from specgraph import ops
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.op_run import run_on
from specgraph_conformance.rig import slot_of


@case(
    "kernels.advance",
    "advance moves the one row of each live request one token forward as a host loop does; inert requests stay inert.",
    hazard="metadata-not-rebuilt-between-steps",
    cause="advance: lengths, positions or slots that stay behind, or a slot past max_model_len or in the null block",
    quick=True,
)
def test_advance(platform: Platform) -> None:
    limit, block = 48, 16
    lengths = [15, 16, 47, 0, 1, 31, 32, 46, 48]
    blocks = [[3 * r + 1, 3 * r + 2, 3 * r + 3 if r % 2 else 0] for r in range(len(lengths))]
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    positions, slots = (torch.full((len(lengths),), -77) for _ in range(2))
    step, table = torch.tensor([1]), torch.tensor(blocks, dtype=torch.int32)
    written = seq_lens, positions, slots, step
    run_on(platform, "captured")(ops.advance, *written, table, limit, block, written=written)
    wanted = [n + 1 if n else 0 for n in lengths]
    places = [min(max(n - 1, 0), limit - 1) for n in wanted]
    to = [slot_of(n - 1, row, limit, block) for n, row in zip(wanted, blocks, strict=True)]
    for name, tensor, expected in (
        ("lengths", seq_lens, wanted),
        ("positions", positions, places),
        ("slots", slots, to),
    ):
        now = tensor.tolist()
        assert now == expected, f"from lengths {lengths}, advance gave {name} {now} instead of {expected}"
    assert step.tolist() == [2]
