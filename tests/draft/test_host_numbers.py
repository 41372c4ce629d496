"""A round on the host consists of the requests up to the last real one, where the engine gave no numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from specgraph_run.decoder.round_stages import HostState

from specgraph import ops
from specgraph.capture import BatchDescriptor
from specgraph.cpu import CpuPlatform
from specgraph.draft.host_lengths import HostNumbers, HostNumbersReader


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
    reader = HostNumbersReader(CpuPlatform(), 4)
    found = reader.read(BatchDescriptor("propose", 4, 3, 2), buffers, None, None)
    assert list(found.start_positions) == starts
    assert list(found.num_sampled) == counts


def on_device(plan, starts, counts=None):
    """The lengths that the op writes for these requests: of the pass, and up to the last sampled token."""
    n, num_sampled = len(starts), None if counts is None else torch.tensor(counts)
    given = ops.RowInputs(torch.tensor(starts), torch.zeros(n, 16, dtype=torch.int32), num_sampled)
    lengths, ends = (torch.zeros(n, dtype=torch.int32) for _ in range(2))
    places = torch.zeros(2, n * plan.rows, dtype=torch.int64)
    ops.begin_rows(given, plan, ops.Rows(*places, lengths, step_seq_lens=ends))
    return lengths.tolist(), ends.tolist()


@pytest.mark.parametrize(("past", "after_sampled"), [(0, False), (3, False), (0, True)])
@pytest.mark.parametrize("offset", [0, 1])
def test_host_lengths_are_those_of_the_device(past, after_sampled, offset):
    """Positions go from the first ones, which have fewer past rows than a plan wants, to the last; inert requests lie
    between others."""
    plan = ops.RowPlan(4, 64, 4, past=past, after_sampled=after_sampled, position_offset=offset)
    requests = [(start, count) for start in (0, 1, 2, 3, 4, 30, 57, 59) for count in (0, 1, 2, 4)]
    host = [[plan.seq_len(*each) for each in requests], [plan.step_seq_len(*each) for each in requests]]
    assert [*on_device(plan, *map(list, zip(*requests, strict=True)))] == host


def test_a_verify_has_the_devices_lengths_also_for_an_inert_request_between_others():
    plan, starts = ops.RowPlan(3, 64, 4), HostState([4, 5, 0], [3, 0, 1]).next_positions
    host = plan.host_lengths(starts, 4)
    assert list(host.seq_lens) == on_device(plan, [7, -1, 1, -1])[0] == [10, 0, 4, 0]


@pytest.mark.parametrize(("after_sampled", "offset"), [(False, 0), (False, 1), (True, 0)])
def test_host_lengths_of_later_steps_are_those_of_the_device(after_sampled, offset):
    """`advance` moves the device's lengths on from step to step, past max_model_len too; inert requests stay inert."""
    plan = ops.RowPlan(4, 64, 4, after_sampled=after_sampled, position_offset=offset)
    starts, counts = [0, 7, 30, 57, 61], [1, 0, 4, 3, 2]
    numbers = HostNumbers(starts, counts, 4, 3, 6)
    lengths = torch.tensor([*on_device(plan, starts, counts)[1], 0], dtype=torch.int32)
    places, table = torch.zeros(2, 6, dtype=torch.int64), torch.ones(6, 16, dtype=torch.int32)
    for step in (1, 2):
        ops.advance(lengths, *places, torch.tensor([step]), table, 64, 4)
        host = numbers.later(plan, step)
        assert (list(host.query_lens), list(host.seq_lens)) == ([1] * 6, lengths.tolist())
