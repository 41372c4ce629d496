"""The persistent tensors of verify passes, besides the buffers that target and drafter share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from specgraph.attention import AttentionMetadata
from specgraph.attention.metadata import allocate_metadata
from specgraph.buffers import VIEW, Axes, Buffers, Once, PerRequest, PerRow
from specgraph.config import DraftConfig
from specgraph.draft import Drafter, DraftTree, ProposeBatch, SharedBuffers
from specgraph.draft.buffers import DraftBuffers
from specgraph_run.decoder import ops as decoder_ops
from specgraph_run.decoder.config import acceptance_chances
from specgraph_run.options import DecoderOptions

PackedDrafts = Annotated[Tensor, Axes(columns="drafts", is_packed=True)]
"""[R, N - 1, ...]"""


def logprobs_of(memory: SharedBuffers, num_requests: int, query_len: int) -> Tensor | None:
    """Return the log-probabilities of a batch's sampled tokens, float32 [num_requests, query_len]. None if no
    log-probabilities are kept."""
    kept = memory.logprobs
    return None if kept is None else kept[: num_requests * query_len].view(num_requests, query_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBuffers(Buffers):
    """The tensors of a verify of R requests with N rows each: the last token and N - 1 drafts.

    A chain of K drafts has N = K + 1 rows. A tree has a row per node; its accepted path has up to S drafts, its depth.
    Tensors with rows per request are packed by the rows of the current batch, as in `SharedBuffers`.
    """

    shared: Annotated[SharedBuffers, VIEW]
    """The buffers that target and drafter share, for the largest batch. With a drafter they are the drafter's own."""
    batch: Annotated[ProposeBatch, VIEW]
    """Views of `shared` for this batch. A verify reads start positions, block table, temperatures and seeds. It writes
    sampled tokens, counts and hidden states."""
    last_token_ids: PerRequest
    """int64 [R], written before a verify."""
    draft_token_ids: PackedDrafts
    """int64 [R, N - 1], written before a verify; -1 is no draft token."""
    draft_probs: PackedDrafts | None = None
    """float32 [R, K, draft_vocab], written before a verify. None if drafts are greedy or trees."""
    draft_parents: PerRequest | None = None
    """int64 [R, N - 1], written before a verify. None for chains."""
    token_ids: PerRow
    """int64 [R * N]"""
    path: decoder_ops.AcceptedPath | None = None
    """Rows of the accepted path, R * (S + 1), and R * S slots between which its keys and values move. None for
    chains."""
    metadata: AttentionMetadata
    ragged: decoder_ops.RaggedRows | None = None
    """The rows of each request in a ragged verify, which has fewer rows in all. The drafter's confidence decides their
    number. None if every request has N rows."""
    synthetic_acceptance: Once | None = None
    """float32 [K]: the chance that each draft is accepted if all before it are. None if the target decides."""

    def sliced(self, num_requests: int, query_len: int, rows: int, verified: int = 0) -> VerifyBuffers:
        """Return contiguous views of the same memory for the first `num_requests` requests.

        Args:
            query_len: rows per request of the results.
            rows: rows per request of the pass.
            verified: the number of verified drafts in all. 0 for all drafts of the requests.
        """
        n, steps = num_requests, rows - 1
        views = self.views(n, rows=rows, drafts=steps, path=query_len, moves=query_len - 1)
        views, chances = replace(views, batch=self.shared.sliced(n, query_len)), self.synthetic_acceptance
        if chances is not None:
            views = replace(views, synthetic_acceptance=chances[: query_len - 1])
        if views.ragged is None:
            return views
        if not steps:
            return replace(views, ragged=None)
        total, at, ends = n + (verified or n * steps), views.metadata, views.ragged.query_start_loc
        metadata = replace(
            at, query_start_loc=ends, positions=at.positions[:total], slot_mapping=at.slot_mapping[:total]
        )
        return replace(views, token_ids=views.token_ids[:total], metadata=metadata)

    def by_row(self, values: Tensor) -> Tensor:
        """Return values with a row for each of R * N rows, from the rows of a pass. A ragged pass has fewer rows: a
        draft that it leaves out gets the values of its request's last row, which acceptance ignores."""
        return values if self.ragged is None else values[self.ragged.columns]

    def copied(self, drafts: DraftBuffers) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of tensors, destination and source, to copy from a drafter besides its draft tokens."""
        n, k = self.draft_token_ids.shape
        confidence = None if self.ragged is None else self.ragged.confidence
        pairs = (
            (self.draft_probs, drafts.draft_probs),
            (self.draft_parents, drafts.draft_parents),
            (confidence, drafts.confidence),
        )
        return [(into, values[:n, :k]) for into, values in pairs if into is not None and values is not None]


def allocate_verify(
    config: DraftConfig,
    options: DecoderOptions,
    query_lens: Sequence[int],
    drafter: Drafter | None,
    memory: SharedBuffers,
    tree: DraftTree | None,
) -> VerifyBuffers:
    """Allocate buffers for the largest batch of `config`, with every request inert. Arguments as in `VerifyProgram`."""
    requests, device = config.max_num_requests, memory.seeds.device
    lens = query_lens if tree is None else (tree.num_draft_tokens,)
    rows, table = lens[-1], memory.block_table

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    path = probs = ragged = chances = None
    if tree is not None:
        moved = requests * tree.num_steps
        path = decoder_ops.AcceptedPath(zeros(requests * (tree.num_steps + 1)), zeros(moved), zeros(moved))
    elif drafter is not None and drafter.config.keeps_draft_probs:
        probs = zeros(requests, rows - 1, drafter.head.draft_vocab_size, dtype=torch.float32)
    if options.verified_drafts is not None:
        confidence, ends = zeros(requests, rows - 1, dtype=torch.float32), zeros(requests + 1, dtype=torch.int32)
        ragged = decoder_ops.RaggedRows(confidence, ends, zeros(requests * rows))
    if options.synthetic_acceptance is not None:
        given = acceptance_chances(options.synthetic_acceptance, config.num_speculative_tokens)
        chances = zeros(max(len(given), query_lens[-1] - 1), dtype=torch.float32)
        chances[: len(given)] = torch.tensor(given)
    return VerifyBuffers(
        shared=memory,
        batch=memory.sliced(requests, query_lens[-1]),
        last_token_ids=zeros(requests),
        draft_token_ids=zeros(requests, rows - 1),
        draft_probs=probs,
        draft_parents=None if tree is None else zeros(requests, rows - 1),
        token_ids=zeros(requests * rows),
        path=path,
        metadata=allocate_metadata(requests, lens, table, 0 if tree is None else rows),
        ragged=ragged,
        synthetic_acceptance=chances,
    )
