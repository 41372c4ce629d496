"""A round on the host consists of the requests up to the last real one, where the engine gave no numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from specgraph import ops
from specgraph.capture import BatchDescriptor, uniform_lengths
from specgraph.device.cpu import CpuPlatform
from specgraph.draft.host_lengths import HostRounds


@pytest.mark.parametrize(
    ("num_sampled", "starts", "counts"),
    [
        ([2, 1, 0, 0], [7, 8], [2, 1]),
        ([0, 3, 0, 0], [7, 8], [0, 3]),  # an inert request before a real one keeps its place
        ([0, 0, 0, 0], [], []),
    ],
)
def test_what_stands_in_the_buffers_up_to_the_last_real_request(num_sampled, starts, counts):
    buffers = SimpleNamespace(
        num_sampled=torch.tensor(num_sampled, dtype=torch.int32), start_positions=torch.tensor([7, 8, 9, 9])
    )
    rounds = HostRounds(CpuPlatform(), 4)
    found = rounds.round(BatchDescriptor("propose", 4, 3, 2), buffers, None, None)
    assert list(found.start_positions) == starts
    assert list(found.num_sampled) == counts


def test_a_verify_has_the_devices_lengths_also_for_an_inert_request_between_others():
    plan, starts, lengths = ops.RowPlan(3, 64, 4), [7, -1, 0], torch.zeros(4, dtype=torch.int32)
    given = ops.RowInputs(torch.tensor([*starts, -1]), torch.zeros(4, 16, dtype=torch.int32))
    ops.begin_rows(given, plan, ops.Rows(torch.zeros(12).long(), torch.zeros(12).long(), lengths))
    host = uniform_lengths(plan, starts, BatchDescriptor("verify", 4, 3, 2))(0)
    assert list(host.seq_lens) == lengths.tolist() == [10, 0, 3, 0]
