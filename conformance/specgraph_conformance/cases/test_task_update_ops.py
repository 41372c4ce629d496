"""Task groups of several captured ops: an update rewrites each of them, with all of its host numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from specgraph import ops
from specgraph.attention import PagedHostAttention
from specgraph.device import Platform
from specgraph.errors import UpdateError
from torch import Tensor

from specgraph_conformance.case import Absent, case
from specgraph_conformance.rig import expect_equal, on_host
from specgraph_conformance.task_rig import BLOCK, BLOCKS, DIM, HEADS, KV_HEADS, REQUESTS, host_attention, replayed

NEEDS = ("task_update",)
SCALE = DIM**-0.5


class Ops:
    """Attention ops with host lengths over caches of their own, captured in one task group."""

    def __init__(self, platform: Platform, count: int) -> None:
        """
        Raises:
            Absent: the platform's attention with host lengths is another.
        """
        if not isinstance(host_attention(platform), PagedHostAttention):
            raise Absent("attention of the device's own issues one op per task group")
        self.platform, device, generator = platform, platform.device, torch.Generator().manual_seed(17)
        self.query = torch.randn(REQUESTS, HEADS, DIM, generator=generator).to(device)
        shape = (1 + REQUESTS * BLOCKS, BLOCK, KV_HEADS, DIM)
        self.caches = [torch.randn(shape, generator=generator).to(device) for _ in range(count)]
        self.table = torch.arange(1, 1 + REQUESTS * BLOCKS, dtype=torch.int32).view(REQUESTS, BLOCKS).to(device)
        self.out = torch.zeros(count, REQUESTS, HEADS, DIM, device=device)
        inert = [[1] * REQUESTS] * count
        self.issue(inert)
        platform.synchronize()
        self.graph = platform.graph()
        with self.graph.capture(), platform.task_group() as self.group:
            self.issue(inert)

    def issue(self, lengths: Sequence[Sequence[int]], scale: float = SCALE) -> None:
        """One op per list of key counts."""
        for cache, rows, seq_lens in zip(self.caches, self.out, lengths, strict=True):
            given = self.query, ops.KVCache(cache, cache), self.table, ops.HostLengths([1] * REQUESTS, list(seq_lens))
            ops.paged_attention_host(*given, ops.Mask(), scale=scale, out=rows)

    def replay(self, lengths: Sequence[Sequence[int]], scale: float = SCALE) -> Tensor:
        """Update and replay in the platform's order; what it left.

        Raises:
            UpdateError: the platform does not rewrite this.
        """
        with replayed(self.platform, self.graph), self.platform.task_update(self.group):
            self.issue(lengths, scale)
        self.platform.synchronize()
        return on_host(self.out)

    def expect_eager(self, seen: Tensor, lengths: Sequence[Sequence[int]], scale: float, what: str) -> None:
        """Each op left the bits of eager."""
        self.issue(lengths, scale)
        self.platform.synchronize()
        for number, (mine, eager) in enumerate(zip(seen, on_host(self.out), strict=True)):
            expect_equal(mine, eager, f"op {number} of the {len(seen)} in the group, after {what}")


def _of_each(count: int, step: int) -> list[list[int]]:
    """Key counts that differ between all ops and requests of an update."""
    keys = BLOCK * BLOCKS
    return [[1 + (step + 7 * op + 23 * request) % keys for request in range(REQUESTS)] for op in range(count)]


@pytest.mark.parametrize("count", [3, 18])
@case(
    "task_update.ops-of-a-group",
    "An update rewrites every op of a group, each with its own lengths.",
    hazard="group-partly-rewritten",
    cause="task_update() rewrites the first or the last op of the group only, or a table of fixed size is too short",
    needs=NEEDS,
)
def test_several_ops(platform: Platform, count: int) -> None:
    ops = Ops(platform, count)
    for step in (0, 29):
        lengths = _of_each(count, step)
        ops.expect_eager(ops.replay(lengths), lengths, SCALE, "the update")


@case(
    "task_update.numbers-besides-lengths",
    "An update rewrites the other host numbers of an op too (here its scale), or is refused and changes nothing.",
    hazard="update-of-lengths-only",
    cause="task_update() takes the lists of an op and keeps its other arguments, or its keyword arguments, as captured",
    needs=NEEDS,
)
def test_scale(platform: Platform) -> None:
    ops = Ops(platform, 2)
    for step, scale in ((0, SCALE), (11, 3 * SCALE), (31, SCALE)):
        lengths = _of_each(2, step)
        try:
            seen = ops.replay(lengths, scale)
        except UpdateError:
            assert scale != SCALE, "an update of lengths alone is refused"
            if platform.capabilities.update_order == "during_replay":  # the replay waits for an update
                with platform.task_update(ops.group):
                    ops.issue(lengths)
                platform.synchronize()
            continue
        ops.expect_eager(seen, lengths, scale, f"an update with {scale / SCALE:g} times the captured scale")
