"""The verify program: the target's pass over the last token of each request and its drafts, and their acceptance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import AttentionMetadata, allocate_metadata
from specgraph.capture import BatchDescriptor, MakeAttend, Phase, StepKind
from specgraph.draft import Drafter, ProposeBatch, RoundBuffers, SamplingBuffers
from specgraph.draft.buffers import DraftBuffers
from specgraph.draft.program import present
from specgraph.engine.config import EngineConfig, acceptance_chances
from specgraph.models.protocol import Target, TargetOutput
from specgraph.models.split import most_likely
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBuffers:
    """The tensors of a verify of R requests with query_len = K + 1 rows each, besides those of the round."""

    round: ProposeBatch
    """Start positions, block table, temperatures and seeds are read; sampled tokens, counts and hidden states are the
    result. A drafter's own memory when there is one."""
    last_token_ids: Tensor
    """int64 [R], written before a verify."""
    draft_token_ids: Tensor
    """int64 [R, K], written before a verify; -1 is no draft token."""
    draft_probs: Tensor | None
    """float32 [R, K, draft_vocab], written before a verify; None when drafts are greedy."""
    token_ids: Tensor
    """int64 [R * query_len]"""
    metadata: AttentionMetadata

    def copied(self, drafts: DraftBuffers) -> list[tuple[Tensor, Tensor]]:
        """Tensors here that are copies of a drafter's besides its tokens, each with what is copied."""
        n, k = self.draft_token_ids.shape
        if self.draft_probs is None or drafts.draft_probs is None:
            return []
        return [(self.draft_probs, drafts.draft_probs[:n, :k])]


@dataclass(frozen=True, slots=True)
class VerifyMemory:
    """What the verify programs of one target write and read together, besides their own buffers."""

    round: RoundBuffers
    """Shared with the drafter."""
    sampling: SamplingBuffers | None
    """What requests ask of sampling besides temperature and seed; None where they may not."""
    logprobs: Tensor | None
    """float32, as many as `round.sampled_token_ids`; None unless `EngineConfig.logprobs`."""

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, for the read-set."""
        asked = {} if self.sampling is None else self.sampling.named_tensors()
        logprobs = {} if self.logprobs is None else {"round.logprobs": self.logprobs}
        return {**self.round.named_tensors(), **asked, **logprobs}


class VerifyProgram:
    """The target's pass over the last token of each request and its drafts, and the acceptance of drafts.

    See `specgraph.capture.model_runner.Program`.
    """

    phase: Phase = "verify"
    step_kind: StepKind = "together"
    later_rows = 1
    name = "verify"
    """What the names of its tensors begin with."""
    of_trees = False

    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        query_lens: Sequence[int],
        drafter: Drafter | None,
        memory: VerifyMemory,
    ) -> None:
        """
        Args:
            query_lens: rows per request that a verify may have, ascending.
            drafter: whose drafts are verified; None decodes with the target alone.
            memory: what the target's verify programs and the drafter share.
        """
        self.target, self.config, self.query_lens = target, config, tuple(query_lens)
        self.memory, self.round, self.sampling = memory, memory.round, memory.sampling
        self.aux_layers: Sequence[int] = () if drafter is None else drafter.head.aux_layers
        requests, rows, device = config.max_num_requests, query_lens[-1], memory.round.seeds.device
        self._vocab_map = None if drafter is None else drafter.head.draft_to_target

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        draft_vocab = drafter.head.draft_vocab_size if config.keeps_draft_probs and drafter is not None else None
        self._last, self._rows = zeros(requests), zeros(requests * rows)
        self._drafts = zeros(requests * (rows - 1))
        self._probs = None
        if draft_vocab is not None:
            self._probs = zeros(requests * (rows - 1), draft_vocab, dtype=torch.float32)
        self._metadata = allocate_metadata(requests, rows, self.round.block_table)
        self._starts = {
            n: torch.arange(0, requests * n + 1, n, dtype=torch.int32, device=device) for n in self.query_lens
        }
        self._chances = zeros(max(config.num_speculative_tokens, rows - 1), dtype=torch.float32)
        if config.synthetic_acceptance is not None:
            chances = acceptance_chances(config.synthetic_acceptance, config.num_speculative_tokens)
            self._chances[: len(chances)] = torch.tensor(chances)

    def sliced(self, num_requests: int, query_len: int) -> VerifyBuffers:
        """The buffers of the first `num_requests` requests of a batch with `query_len` rows each: contiguous views."""
        n, rows, steps = num_requests, num_requests * query_len, query_len - 1
        probs, starts = self._probs, self._starts[query_len]
        whole = replace(self._metadata, query_start_loc=starts, query_len=query_len)
        return VerifyBuffers(
            round=self.round.sliced(n, query_len),
            last_token_ids=self._last[:n],
            draft_token_ids=self._drafts[: n * steps].view(n, steps),
            draft_probs=None if probs is None else probs[: n * steps].view(n, steps, probs.shape[1]),
            token_ids=self._rows[:rows],
            metadata=whole.sliced(n),
        )

    def rows(self, query_len: int) -> int:
        """Rows per request of the pass after which the round has `query_len` rows per request: as many."""
        return query_len

    def plan(self, query_len: int) -> RowPlan:
        """The rows of the pass after which the round has `query_len` rows per request."""
        return RowPlan(query_len, self.config.max_model_len, self.config.block_size)

    def logprobs(self, num_requests: int, query_len: int) -> Tensor | None:
        """float32 [num_requests, query_len]: of the sampled tokens; None unless `EngineConfig.logprobs`."""
        if self.memory.logprobs is None:
            return None
        return self.memory.logprobs[: num_requests * query_len].view(num_requests, query_len)

    def num_steps(self, batch: BatchDescriptor) -> int:
        """1."""
        return 1

    def batches(self) -> list[BatchDescriptor]:
        """Every captured size with every number of rows, largest first."""
        return [
            BatchDescriptor("verify", size, self.rows(query_len), query_len - 1, tree=self.of_trees)
            for size in reversed(self.config.sizes)
            for query_len in reversed(self.query_lens)
        ]

    def make_inert(self) -> None:
        """No request has a position."""
        self.round.start_positions.fill_(-1)

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The buffers, and the drafter's vocabulary map."""
        name = self.name
        named = {**self.memory.named_tensors(), **self._metadata.named_tensors(f"{name}.metadata")}
        named |= {f"{name}.last_token_ids": self._last, f"{name}.draft_token_ids": self._drafts}
        named |= {f"{name}.token_ids": self._rows, f"{name}.synthetic_acceptance": self._chances}
        named |= {f"{name}.query_start_loc.{rows}": tensor for rows, tensor in self._starts.items()}
        optional = {
            f"{name}.draft_probs": self._probs,
            "draft_to_target": self._vocab_map,
        }
        return named | {key: tensor for key, tensor in optional.items() if tensor is not None}

    def work_of(self, batch: BatchDescriptor) -> Callable[[Sequence[int], MakeAttend], None]:
        """Rows, the target, its hidden states for the drafter, and acceptance."""
        b = self.sliced(batch.num_requests, batch.query_len)

        def work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            self.begin(b, self.plan(batch.query_len))
            out = self.target.forward(b.token_ids, make_attend(b.metadata, 0), self.aux_layers)
            self.hand_over(out, b.round.aux_hidden)
            self._accept(b, out.hidden)

        return work

    def begin(self, b: VerifyBuffers, plan: RowPlan, draft_parents: Tensor | None = None) -> None:
        """Fill the rows: the last token of each request, then its drafts."""
        given = RowInputs(
            b.round.start_positions,
            b.round.block_table,
            token_ids=b.last_token_ids[:, None],
            draft_token_ids=b.draft_token_ids,
            draft_parents=draft_parents,
        )
        places = b.metadata.positions, b.metadata.slot_mapping, b.metadata.seq_lens
        ops.begin_rows(given, plan, Rows(*places, b.token_ids, ancestors=b.metadata.ancestors))

    def hand_over(self, out: TargetOutput, into: Tensor) -> None:
        """Copy the hidden states that the drafter takes; without a drafter `into` has no columns."""
        if into.shape[1]:
            into.copy_(out.aux_hidden if self.aux_layers else out.hidden)

    def _accept(self, b: VerifyBuffers, hidden: Tensor) -> None:
        """Write the sampled tokens and their counts."""
        out = self.target.projection
        config = self.config
        needs_logits = config.sampled or config.logprobs or config.sampling_parameters
        if out is not None and out.is_split and not needs_logits and config.synthetic_acceptance is None:
            best = most_likely(out.logits(hidden), out.tensor_parallel)
            sampled = ops.Sampled(b.round.sampled_token_ids, b.round.num_sampled)
            ops.accept_greedy(best, b.draft_token_ids, b.round.start_positions, sampled)
        else:
            self._accept_by_logits(b, self.target.logits(hidden))

    def _acceptance(self, b: VerifyBuffers) -> ops.Acceptance:
        if self.config.synthetic_acceptance is not None:
            steps = b.round.sampled_token_ids.shape[1] - 1
            return ops.Acceptance(seeds=present(b.round.seeds), chances=self._chances[:steps])
        if not self.config.sampled:
            return ops.Acceptance()
        return ops.Acceptance(present(b.round.temperature), present(b.round.seeds), b.draft_probs, self._vocab_map)

    def _accept_by_logits(self, b: VerifyBuffers, logits: Tensor) -> None:
        drafts, starts = b.draft_token_ids, b.round.start_positions
        tokens = b.round.sampled_token_ids
        raw = logits
        asked = None if self.sampling is None else self.sampling.sliced(slice(0, starts.shape[0]))
        if asked is not None:
            logits = asked.adjusted(logits, drafts, present(b.round.temperature))
        ops.verify_drafts(logits, drafts, starts, self._acceptance(b), ops.Sampled(tokens, b.round.num_sampled))
        if asked is not None:
            ops.count_tokens(tokens, asked.output_counts)
        logprobs = self.logprobs(*tokens.shape)
        if logprobs is not None:
            ops.emitted_logprobs(raw, tokens, logprobs)
