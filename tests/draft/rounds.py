"""Drafters, and simulated target rounds: what an engine would hand to them, without a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from specgraph_run.decoder.blocks import BlockAllocator
from torch import Tensor

from specgraph.attention import Attend, allocate_caches, choose_attention
from specgraph.cpu import CpuPlatform
from specgraph.draft import DraftConfig, Drafter, ProposeBatch
from specgraph.draft.protocol import DraftHead, DraftOutput

LOWERINGS = ("eager", "piecewise", "step", "merged")


def make_drafter(head, lowering, attention=None, capture=True, platform=None, **settings):
    """Make a drafter, on the CPU by default; attention: a backend, or "device" or "host" for the core's own."""
    platform = platform or CpuPlatform()
    config = DraftConfig(decode=lowering, **{"block_size": 4, "check_inputs": True, **settings})
    blocks = 1 + -(-(config.max_model_len + config.scratch_tokens) // config.block_size) * config.max_num_requests
    caches = allocate_caches(head.attention_layers, blocks, config.block_size, head.dtype, platform.device)
    if isinstance(attention, str):
        attention = choose_attention(attention, platform).backend
    drafter = Drafter(head, caches, platform, config, attention=attention)
    if capture:
        with torch.inference_mode():
            drafter.capture()
    return drafter


@dataclass
class LoggedHead:
    """A head that also writes its logits into a named buffer, column by column as the device counts steps."""

    head: DraftHead
    log: Tensor
    """[K, max_num_requests, draft_vocab]"""
    draft_step: Tensor | None = None
    """The drafter's counter; set once the drafter exists."""

    def __getattr__(self, name: str):
        if name in ("projection", "pair_input"):  # so that `logits` and `forward` here are called
            return None
        return getattr(self.head, name)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head.logits(hidden)
        if hidden.shape[0] <= self.log.shape[1]:  # more rows than requests: the shape check before a capture
            self.log[:, : hidden.shape[0]].index_copy_(0, self.draft_step, logits[None])
        return logits

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None) -> DraftOutput:
        return self.head.forward(token_ids, hidden, attend, rows)

    def weights(self) -> Mapping[str, Tensor]:
        return {**self.head.weights(), "log": self.log}


@dataclass
class Sequence_:
    """One simulated request."""

    blocks: list[int]
    position: int
    seed: int


class RandomBatches:
    """Batches that shrink and grow, requests that advance by what was 'accepted', all drawn from one seed."""

    def __init__(self, config: DraftConfig, aux_size: int, vocab: int, dtype: torch.dtype, seed: int) -> None:
        self.config, self.aux_size, self.vocab, self.dtype = config, aux_size, vocab, dtype
        self.g = torch.Generator().manual_seed(seed)
        per_request = -(-config.max_model_len // config.block_size)
        self.num_blocks = 1 + per_request * config.max_num_requests
        self.allocator = BlockAllocator(self.num_blocks)
        self.per_request = per_request
        self.live: list[Sequence_] = []

    def _int(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.g))

    def next(self, num_requests: int | None = None) -> ProposeBatch:
        """One round. A request near max_model_len goes on past it once, as the padded rows of a real round do."""
        want = num_requests or self._int(1, self.config.max_num_requests + 1)
        while len(self.live) > want:
            self.allocator.free(self.live.pop(self._int(0, len(self.live))).blocks)
        edge = self.config.max_model_len - self.config.num_speculative_tokens - 2
        while len(self.live) < want:
            start = (0, self.config.block_size - 1, self.config.block_size, edge, self._int(0, edge))[self._int(0, 5)]
            self.live.append(Sequence_(self.allocator.allocate(self.per_request), start, self._int(0, 1 << 30)))
        n, q = want, self.config.query_len
        counts = [(1, q, self._int(1, q + 1))[self._int(0, 3)] for _ in range(n)]
        batch = ProposeBatch(
            sampled_token_ids=torch.randint(0, self.vocab, (n, q), generator=self.g),
            num_sampled=torch.tensor(counts, dtype=torch.int32),
            start_positions=torch.tensor([s.position for s in self.live]),
            aux_hidden=torch.randn(n * q, self.aux_size, generator=self.g).to(self.dtype),
            block_table=torch.tensor([s.blocks for s in self.live], dtype=torch.int32),
        )
        if self.config.sampled:
            temperature = torch.tensor([0.0 if i % 3 == 2 else 0.7 + 0.1 * i for i in range(n)])
            batch = replace(batch, temperature=temperature, seeds=torch.tensor([s.seed for s in self.live]))
        for state, count in zip(list(self.live), counts, strict=True):
            state.position += count
            if state.position >= self.config.max_model_len - 1:
                self.allocator.free(state.blocks)
                self.live.remove(state)
        return batch


def caches_equal(a: Sequence[tuple[Tensor, Tensor]], b: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Bit equality of all KV caches."""
    return all(torch.equal(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True))
