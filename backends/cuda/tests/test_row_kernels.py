"""The Triton kernel that copies a batch. Later launches reuse what the first one compiled."""

from __future__ import annotations

import torch
from specgraph_conformance.op_rows.rounds import a_round

from specgraph import ops
from specgraph.device import Platform
from specgraph.ops.copies import BatchTensors


def test_a_round_of_any_alignment_is_loaded(platform: Platform) -> None:
    """The first launch compiles for aligned tensors, and what it compiled must not serve others."""
    for shift in (0, 1, 0, 3):
        given = a_round(torch.Generator().manual_seed(shift), 2, 6, 40, 4)
        memory = [torch.cat((tensor.flatten()[:1].expand(shift), tensor.flatten())).cuda() for tensor in given]
        there = BatchTensors(*(flat[shift:].view_as(tensor) for flat, tensor in zip(memory, given, strict=True)))
        held = BatchTensors(*(torch.cat((tensor, tensor)) for tensor in given))
        on_device = BatchTensors(*(tensor.cuda() for tensor in held))
        ops.load_batch(there, on_device)
        ops.load_batch.reference(given, held)
        for name, tensor in held._asdict().items():
            assert torch.equal(getattr(on_device, name).cpu(), tensor), name
