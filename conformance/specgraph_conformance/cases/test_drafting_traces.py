"""Golden traces through a drafter's graphs: the exact draft tokens of a checkpoint, as requests join and leave."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from specgraph.attention import NULL_BLOCK
from specgraph.checkpoints import load_drafter, load_target
from specgraph.device import LOWERINGS, Platform
from specgraph.draft import Drafter
from specgraph.engine import allocate_caches
from specgraph.errors import UnsupportedError

from specgraph_conformance.case import Absent, case
from specgraph_conformance.draft_rig import make_config, num_blocks
from specgraph_conformance.rig import AttentionShape, attention_backend, on_host, supported_shape
from specgraph_conformance.traces import Trace, TraceRequest, TraceRound, load_trace, replay


@dataclass
class TracedDrafter:
    """The adapter of a `Drafter`: keeps the KV blocks of running requests and prefills those that join."""

    drafter: Drafter
    blocks: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    free: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.free = list(range(1, num_blocks(self.drafter.config)))

    def propose(self, round: TraceRound) -> list[list[int]]:
        """Draft for one round of the trace."""
        running = {request.id for request in round.requests}
        for id in [id for id in self.blocks if id not in running]:
            self.free += self.blocks.pop(id)  # the next request to join gets a mixture of freed blocks
        batch = self.drafter.inputs(len(round.requests))
        batch.block_table.fill_(NULL_BLOCK)
        for row, request in enumerate(round.requests):
            if request.joins:
                self._prefill(request)
            blocks, sampled = self.blocks[request.id], request.token_ids[-request.num_sampled :]
            batch.block_table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            batch.sampled_token_ids[row, : len(sampled)] = torch.tensor(sampled)
            batch.num_sampled[row] = len(sampled)
            batch.start_positions[row] = request.start_position
        batch.aux_hidden.zero_()
        drafts = self.drafter.propose(
            batch,
            host_start_positions=[request.start_position for request in round.requests],
            host_num_sampled=[request.num_sampled for request in round.requests],
        )
        return on_host(drafts.token_ids).tolist()

    def _prefill(self, request: TraceRequest) -> None:
        config = self.drafter.config
        blocks = self.blocks[request.id] = [self.free.pop() for _ in range(config.max_blocks)]
        prompt, most = request.token_ids[: request.num_prompt], config.prefill_rows[-1]
        for first in range(0, len(prompt), most):
            positions = range(first, min(first + most, len(prompt)))
            aux = torch.zeros(len(positions), self.drafter.head.aux_size, device=self.drafter.platform.device)
            self.drafter.prefill(prompt, positions, blocks, aux.to(self.drafter.head.dtype))


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.golden-trace",
    "A checkpoint's drafter gives the exact draft tokens of a recorded trace, as requests join, leave and reject.",
    hazard="head-arithmetic",
    cause="KV of rejected drafts, of a request that left, or of a prompt in chunks: see the round that is named",
)
def test_trace(platform: Platform, attention: str, lowering: str) -> None:
    trace: Trace = load_trace("draft-model")
    backend = attention_backend(platform, attention)
    fits = supported_shape(backend, (2, 1), AttentionShape(block=16))
    if fits.dim != 64:
        raise Absent(f"attention '{backend.name}' takes no head_dim 64, which the trace's checkpoint has")
    target = load_target(trace.folder, platform.device, fits.dtype)
    head = load_drafter(trace.folder, target, fits.dtype)
    config = make_config(
        decode=lowering, k=trace.num_speculative_tokens, max_num_requests=5, max_model_len=128, block_size=fits.block
    )
    caches = allocate_caches(head.attention_layers, num_blocks(config), config.block_size, fits.dtype, platform.device)
    try:
        drafter = Drafter(head, caches, platform, config, attention=backend)
        drafter.capture()
    except UnsupportedError as error:
        raise Absent(str(error)) from error
    replay(trace, TracedDrafter(drafter).propose)
    drafter.close()
