"""The stages of a round: propose drafts for the tokens that the target sampled last, hand them over, and verify them.

Between two rounds a request's state is on the device: the tokens that the target sampled, their number, the position
they begin at, and hidden states. A round begins with the propose. So a new request needs no pass of its own: after its
prefill it looks like a request that sampled one token (`ProposeBatch.join`). And a host that has read the last round
knows all lengths of the next one before it launches it.

Propose and verify have graphs of their own, as the lowering says. The hand-over is two or three small ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from specgraph_models.target import Target

from specgraph.attention import AttentionBackend, KVCache, allocate_caches
from specgraph.capture import BatchDescriptor, ModelRunner, Pass, padded_size
from specgraph.config import DraftConfig
from specgraph.device import Platform
from specgraph.draft import Drafter, ProposeBatch
from specgraph.draft.program import DraftProgram
from specgraph.draft.protocol import Head
from specgraph_run.decoder import ops as decoder_ops
from specgraph_run.decoder.blocks import cache_dtype
from specgraph_run.decoder.sampling_buffers import allocate_sampling
from specgraph_run.decoder.target import TargetRunner
from specgraph_run.decoder.verify import VerifyProgram
from specgraph_run.options import DecoderOptions


class HostState(NamedTuple):
    """The results of the last round on the host, for attention with host parameters."""

    start_positions: Sequence[int]
    """The position of each request's first row."""
    num_sampled: Sequence[int]

    @property
    def next_positions(self) -> list[int]:
        """The position of each request's first row in the next verify; -1 for inert requests."""
        requests = zip(self.start_positions, self.num_sampled, strict=True)
        return [start + count if count else -1 for start, count in requests]


Stage = Callable[[HostState | None], None]
"""A function that launches one stage of a round. Its argument is None if attention takes lengths from the device."""


@dataclass(frozen=True, slots=True)
class Round:
    """The launches of a round over one padded batch."""

    query_len: int
    """Rows per request of the round's result: K + 1."""
    stages: tuple[Stage, ...]


class RoundStages:
    """The model runners of one decoder, and its rounds, which are made once for each shape of batch."""

    def __init__(
        self,
        target: Target,
        head: Head | None,
        platform: Platform,
        config: DraftConfig,
        options: DecoderOptions,
        *,
        query_len: int,
        num_blocks: int,
        attention: AttentionBackend,
    ) -> None:
        """Allocate the KV caches and all other buffers of a decoder, and make its runners. Nothing is captured yet.

        Args:
            head: None if the target decodes alone.
            query_len: rows per request of the first round's result. Without a drafter all rounds have it.
            num_blocks: blocks of each KV cache, the null block included.
            attention: for target and drafter.

        Raises:
            CapacityError: the device has not enough memory.
            UnsupportedError: the chosen lowering is not possible on this platform.
        """

        def caches(model: Target | Head) -> list[KVCache]:
            dtype = cache_dtype(options.kv_cache_dtype, model.dtype)
            return allocate_caches(model.attention_layers, num_blocks, config.block_size, dtype, platform.device)

        sampling = drafter = None
        if options.sampling_parameters:
            sampling = allocate_sampling(config.max_num_requests, target.vocab_size, platform.device)
        if head is not None:
            drafter = Drafter(head, caches(head), platform, config, attention=attention, sampling=sampling)
        self.query_len, self._config, self.drafter = query_len, config, drafter
        self.target = TargetRunner(
            target,
            caches(target),
            platform,
            config,
            options,
            attention=attention,
            query_len=query_len,
            drafter=drafter,
            sampling=sampling,
        )
        self.runners: dict[str, ModelRunner] = {"target": self.target}
        """The runners by name, in the order in which they capture."""
        if drafter is not None:
            self.runners["drafter"] = drafter
        self._found: dict[tuple[int, int, int | None], Round] = {}

    def find(self, num_requests: int, query_len: int, num_speculative_tokens: int | None = None) -> Round:
        """Return the round over the first `num_requests` rows of the shared buffers.

        Args:
            query_len: rows per request in the round before.
            num_speculative_tokens: one of `DraftConfig.k_candidates`. None for the K that the config gives the batch.
        """
        key = num_requests, query_len, num_speculative_tokens
        if (known := self._found.get(key)) is None:
            known = self._found[key] = self._make(*key)
        return known

    def _make(self, num_requests: int, query_len: int, asked: int | None) -> Round:
        size, target, drafter = padded_size(num_requests, self._config.sizes), self.target, self.drafter
        n, captured = size or num_requests, size is not None
        k, tree = (self.query_len - 1, False) if drafter is None else self._config.shape(n)
        k = k if asked is None else asked
        program = target.verify_programs[tree]
        verified = program.verified(n, k + 1)
        batch = BatchDescriptor("verify", n, program.rows(k + 1), k, tree=tree, verified=verified)
        propose: tuple[Stage, ...] = ()
        draft = None
        if drafter is not None:
            draft = drafter.draft_programs[tree]
            propose = (partial(_propose, drafter, drafter.inputs(num_requests, query_len), asked),)
        verify = partial(_verify, target, target.prepare(program, batch, captured))
        return Round(k + 1, (*propose, _hand_over(program, draft, n, query_len, k), verify))


def _propose(drafter: Drafter, batch: ProposeBatch, num_speculative_tokens: int | None, host: HostState | None) -> None:
    starts, counts = (None, None) if host is None else host
    drafter.propose(
        batch,
        host_start_positions=starts,
        host_num_sampled=counts,
        copy=False,
        num_speculative_tokens=num_speculative_tokens,
    )


def _hand_over(
    verify: VerifyProgram, draft: DraftProgram[Any, Any] | None, num_requests: int, query_len: int, k: int
) -> Stage:
    """Return the stage that writes the inputs of the verify: last tokens, positions and drafts of a padded batch.

    Args:
        draft: None if the target decodes alone. Only the last tokens are then written.
        query_len: rows per request in the round before.
        k: K of the drafts, or the depth of their trees.
    """
    before, b = verify.buffers.shared.sliced(num_requests, query_len), verify.sliced(num_requests, k + 1)
    into = b.draft_token_ids
    drafts = into if draft is None else draft.buffers.draft_token_ids[:num_requests, : into.shape[1]]
    copied = [] if draft is None else b.copied(draft.buffers)

    def hand_over(host: HostState | None) -> None:
        decoder_ops.next_verify(
            before.sampled_token_ids, before.num_sampled, drafts, before.start_positions, b.last_token_ids, into
        )
        for values, source in copied:
            values.copy_(source)

    return hand_over


def _verify(target: TargetRunner, ready: Pass, host: HostState | None) -> None:
    target.verify(ready, () if host is None else host.next_positions)
