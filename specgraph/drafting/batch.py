"""What an engine hands to a drafter for one propose, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specgraph import kernels
from specgraph.drafting.buffers import DraftBuffers
from specgraph.errors import ConfigError
from specgraph.graphs import Dispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeBatch:
    """The end of the target's round for n requests, on the drafter's device: q = K + 1 rows each for the K verified."""

    sampled_token_ids: Tensor
    """int64 [n, q]: accepted draft tokens, then the token the target sampled, then anything."""
    num_sampled: Tensor
    """int32 [n]: accepted + 1, at least 1."""
    start_positions: Tensor
    """int64 [n]: position of each request's first row in the target's pass."""
    aux_hidden: Tensor
    """[n * q, aux_size]: the target's hidden states of those rows."""
    block_table: Tensor
    """int32 [n, b]: blocks of each request in order, covering start + 2 * K + 2 tokens (a parallel drafter's block
    may end there) or max_model_len."""
    temperature: Tensor | None = None
    """float32 [n]; needed by a sampled drafter."""
    seeds: Tensor | None = None
    """int64 [n]; needed by a sampled drafter."""
    host_start_positions: Sequence[int] | None = None
    """The same as start_positions, where the engine knows them: spares attention with host parameters a wait."""
    host_num_sampled: Sequence[int] | None = None

    @property
    def num_requests(self) -> int:
        """n."""
        return self.num_sampled.shape[0]

    @property
    def query_len(self) -> int:
        """q."""
        return self.sampled_token_ids.shape[1] if self.sampled_token_ids.dim() == 2 else 0


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """The result of one propose; owned by the caller."""

    token_ids: Tensor
    """int64 [n, K]"""
    probs: Tensor | None
    """float32 [n, K, draft_vocab] for a sampled drafter."""
    dispatch: Dispatch
    """The size it ran at, and whether a graph served it."""


def load_batch(buffers: DraftBuffers, batch: ProposeBatch) -> None:
    """Write a batch into the persistent buffers, in place, and make all later requests inert.

    Raises:
        ConfigError: a tensor has the wrong shape; nothing was written.
    """
    n, query_len = batch.num_requests, batch.query_len
    sampled_token_ids, aux_hidden = buffers.handed_over(query_len)
    width = buffers.block_table.shape[1]
    _expect("sampled_token_ids", batch.sampled_token_ids, (n, query_len))
    _expect("start_positions", batch.start_positions, (n,))
    _expect("aux_hidden", batch.aux_hidden, (n * query_len, aux_hidden.shape[1]))
    if batch.block_table.dim() != 2 or batch.block_table.shape[0] != n or batch.block_table.shape[1] > width:
        raise ConfigError(f"block_table is {list(batch.block_table.shape)}, expected [{n}, at most {width}]")
    for name in ("temperature", "seeds"):
        if buffers.draft_probs is not None and getattr(batch, name) is None:
            raise ConfigError(f"a sampled drafter needs {name} with every batch")
    kernels.load_round(
        batch.sampled_token_ids,
        batch.num_sampled,
        batch.start_positions,
        batch.aux_hidden,
        batch.block_table,
        to_sampled_token_ids=sampled_token_ids,
        to_num_sampled=buffers.num_sampled,
        to_start_positions=buffers.start_positions,
        to_aux_hidden=aux_hidden,
        to_block_table=buffers.block_table,
    )
    if batch.temperature is not None and batch.seeds is not None:
        buffers.temperature[:n].copy_(batch.temperature)
        buffers.seeds[:n].copy_(batch.seeds)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ConfigError(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
