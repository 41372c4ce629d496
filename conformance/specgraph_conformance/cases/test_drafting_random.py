"""Random proposes: a state machine of requests that join, leave, pause and reject drafts, on any stream, at any K."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import expect_oracle, float64_head, rig
from specgraph_conformance.draft_rig import DraftRig, HostBatch, make_config, num_blocks
from specgraph_conformance.rig import expect_equal, on_host
from specgraph_conformance.state_machines import Machine, run_machine, step
from specgraph_conformance.tiny_models import PROGRAMS, VOCAB, Head

SCHEDULE = {1: 4, 2: 0, 4: 3}
"""K by the number of running requests. It grows, shrinks and becomes 0 as requests come and go. Three are padded to
four."""
EXAMPLES, STEPS = 2, 12
"""The machine's runs in one case, and the steps of each. The case takes seconds with any seed."""


@dataclass
class Running:
    """The state of one request in a host engine."""

    start: int
    """The position of the first row of the next batch."""
    blocks: list[int]
    just_joined: bool = True


class RandomProposes(Machine):
    """Drives two drafters, one captured and one eager, through the same steps.

    After each propose both have the same bits in drafts and KV. They agree with a dense float64 drafter that starts
    from the KV before the propose.
    """

    captured: DraftRig
    eager: DraftRig
    reference: Head
    """The drafters' head in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Running] = []
        self.free = list(range(1, num_blocks(self.captured.config)))
        self.rows = self.captured.config.query_len
        """The rows per request of the next batch: the K of the propose before it, plus 1."""

    @property
    def config_limit(self) -> int:
        """The last start position with all drafts before max_model_len."""
        return self.captured.config.max_model_len - 2 * self.captured.config.query_len - 1

    @precondition(lambda self: len(self.running) < self.captured.config.max_num_requests)
    @step(length=st.integers(1, 40), seed=st.integers(0, 999), order=st.randoms(use_true_random=False))
    def join(self, length: int, seed: int, order: Random) -> None:
        """Prefill a prompt in prefill chunks, into blocks that other requests may have used."""
        made, generator = self.captured, torch.Generator().manual_seed(seed)
        blocks = [self.free.pop() for _ in range(made.config.max_blocks)]  # the blocks freed last come first
        order.shuffle(blocks)
        tokens = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        aux = torch.randn(length, made.head.aux_size, generator=generator).to(made.platform.device, made.head.dtype)
        most = made.config.prefill_rows[-1]
        for first in range(0, length, most):
            positions = range(first, min(first + most, length))
            for each in (self.captured, self.eager):
                each.prefill(tokens, positions, blocks, aux[first : positions.stop])
        self.running.append(Running(length - made.drafter.position_offset, blocks))

    @precondition(lambda self: self.running)
    @step(place=st.integers(0, 99))
    def leave(self, place: int) -> None:
        """Give the blocks of a request back, and move the last request to its row."""
        index = place % len(self.running)
        self.free += self.running[index].blocks
        self.running[index] = self.running[-1]
        self.running.pop()

    @precondition(lambda self: self.running)
    @step(
        accepted=st.lists(st.integers(0, 4), min_size=4, max_size=4),
        paused=st.sampled_from([None, None, None, 0, 1]),
        seed=st.integers(0, 999),
        side=st.booleans(),
    )
    def round(self, accepted: list[int], paused: int | None, seed: int, side: bool) -> None:
        """Run one propose. Each request accepted some of its last drafts, and one request may be inert."""
        generator, n, q = torch.Generator().manual_seed(seed), len(self.running), self.rows
        counts = [1 if r.just_joined else min(a, q - 1) + 1 for r, a in zip(self.running, accepted, strict=False)]
        if paused is not None and paused < n:
            counts[paused] = 0
        batch = HostBatch(
            torch.randint(0, VOCAB, (n, q), generator=generator),
            counts,
            [request.start for request in self.running],
            torch.randn(n * q, self.captured.head.aux_size, generator=generator),
            [request.blocks for request in self.running],
            torch.zeros(n),
            torch.zeros(n, dtype=torch.int64),
        )
        self._compare(batch, side)
        self.rows = self.captured.drafter.dispatch(n, q).descriptor.num_speculative_tokens + 1
        for request, count in zip(self.running, counts, strict=True):
            request.start += count
            request.just_joined = request.just_joined and count == 0
        for request in [r for r in self.running if r.start > self.config_limit]:
            self.leave(self.running.index(request))

    def _compare(self, batch: HostBatch, side: bool) -> None:
        platform = self.captured.platform
        main, stream = platform.current_stream(), platform.stream() if side else None
        if stream is not None:
            stream.wait_stream(main)
        with nullcontext() if stream is None else platform.use(stream):
            live = [row for row, count in enumerate(batch.num_sampled) if count]
            expect_oracle(self.captured, batch, self.reference, rows=live)
            ours = self.captured.propose(batch)  # a propose may be repeated
            eager = self.eager.propose(batch)
        if stream is not None:
            main.wait_stream(stream)
        platform.synchronize()
        # The drafts of an inert request are undefined, and differ between lowerings.
        assert on_host(ours.token_ids)[live].tolist() == on_host(eager.token_ids)[live].tolist(), "draft tokens"
        for layer, (a, b) in enumerate(zip(self.captured.host_caches(), self.eager.host_caches(), strict=True)):
            expect_equal(a[0], b[0], f"keys of layer {layer}")
            expect_equal(a[1], b[1], f"values of layer {layer}")


@pytest.mark.parametrize("kind", [kind for kind in PROGRAMS if kind != "eagle3"])
@case(
    "drafting.random-rounds",
    "In random rounds of requests that join, leave, pause and reject drafts as K follows the batch, drafts and KV are "
    "those of eager and of float64.",
    cause="the steps named below, which are the fewest that show it: what the last one leaves behind or takes over",
    timeout=400,
)
def test_random(platform: Platform, attention: str, kind: str, seed: int, examples: int) -> None:
    config = make_config(decode="auto", k=4, draft_schedule=SCHEDULE, capture_sizes=(1, 2, 4))
    captured = rig(platform, config, attention, kind)
    eager = rig(platform, replace(config, decode="eager"), attention, kind)
    members = {"captured": captured, "eager": eager, "reference": float64_head(captured, kind)}
    run_machine(RandomProposes, members, seed, EXAMPLES * examples, STEPS)
