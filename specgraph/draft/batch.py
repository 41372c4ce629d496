"""The target's results that a propose takes, and the draft tokens that it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention.metadata import allocate_block_table
from specgraph.buffers import Axes, Buffers, Once, PerRequest, PerRow
from specgraph.capture import Dispatch
from specgraph.config import DraftConfig
from specgraph.draft.protocol import LogitsAdjustment
from specgraph.errors import ConfigError
from specgraph.ops.copies import BatchTensors
from specgraph.ops.tensor_forms import check_forms, described, has_rows
from specgraph.validation import check, checked


def has_states(tensor: Tensor) -> bool:
    """Return whether a tensor can hold hidden states: floats, unless it has no columns."""
    return has_rows(tensor) and (tensor.is_floating_point() or tensor.numel() == 0)


_BATCH_FORMS = {
    "sampled_token_ids": "integers [n, query_len]",
    "num_sampled": "integers [n]",
    "start_positions": "integers [n]",
    "aux_hidden": "any [rows, aux_size]",
    "block_table": "integers [n, blocks]",
    "temperature": "floats [n] or None",
    "seeds": "integers [n] or None",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeBatch(Buffers):
    """The target's results for n requests, on the drafter's device: the input of a propose.

    A verify of K draft tokens has query_len = K + 1 rows per request.

    The tensors are the host engine's own, or the drafter's memory (`Drafter.inputs`), written in place. `propose`
    copies the host engine's tensors and converts other integer and float dtypes. `bind`, and `propose` with `debug`,
    refuse other dtypes.
    """

    sampled_token_ids: Annotated[Tensor, Axes(columns="rows")]
    """int64 [n, query_len]: the accepted draft tokens, then the token that the target sampled. Columns after
    `num_sampled`, all of an inert request, may hold anything, and host engines have -1 there: no program reads them."""
    num_sampled: PerRequest
    """int32 [n]: accepted draft tokens + 1. 0 makes a request inert: its drafts mean nothing, and it writes no KV."""
    start_positions: PerRequest
    """int64 [n]: the position of each request's first row in the target's pass."""
    aux_hidden: PerRow
    """[n * query_len, aux_size]: the target's hidden states of the rows of its pass."""
    block_table: PerRequest
    """int32 [n, b], b at most `DraftConfig.max_blocks`: the blocks of each request in order, filled up with NULL_BLOCK.
    They cover start + 2 * query_len tokens, since a parallel drafter's block may end there, but no more than
    max_model_len. They cover `DraftConfig.scratch_tokens` more on top."""
    temperature: PerRequest | None = None
    """float32 [n]. A sampled drafter (`DraftConfig.sampled`) needs it; it is None for a greedy one."""
    seeds: PerRequest | None = None
    """int64 [n]. A sampled drafter needs it; it is None for a greedy one."""

    @property
    def num_requests(self) -> int:
        return self.num_sampled.shape[0]

    @property
    def query_len(self) -> int:
        """Rows per request."""
        return self.sampled_token_ids.shape[1] if self.sampled_token_ids.dim() == 2 else 0

    @checked
    def join(self, row: int, token_id: int | Tensor, aux_hidden: Tensor | None) -> None:
        """Fill request `row` for a prompt that was just prefilled, as if a verify had sampled one token.

        The next propose then runs the head over the prompt's last row, which no prefill pass does. The caller writes
        `start_positions` (the last prompt position) and `block_table`.

        Args:
            token_id: an integer, or an integer tensor without dimensions, which stays on the device: the first token
                after the prompt. `propose` with `debug` refuses one outside of the vocabulary; it is not checked here.
            aux_hidden: [aux_size]: the hidden state of the prompt's last row, from the `Drafter.prefill` of the last
                prefill chunk. None only without a drafter: `self.aux_hidden` then has no columns.

        Raises:
            ConfigError: this batch has no such row, a tensor of it has another shape than its field says, or the hidden
                state is missing or has another shape. Nothing was written.
        """
        check_forms(
            "join", {field.name: getattr(self, field.name) for field in fields(self)}, _BATCH_FORMS, written=True
        )
        if self.aux_hidden.shape[0] != self.num_requests * self.query_len:
            raise ConfigError(
                f"join: aux_hidden is {described(self.aux_hidden)}, expected a row for each of "
                f"{self.num_requests} x {self.query_len} sampled_token_ids"
            )
        if not 0 <= row < self.num_requests:
            raise ConfigError(f"join: row {row} of a batch of {self.num_requests} requests: call inputs() with more")
        if aux_hidden is None and self.aux_hidden.shape[1]:
            raise ConfigError(
                f"join: row {row} has no hidden state: Drafter.prefill returns it with the chunk that holds the "
                "prompt's last position, and None before; give it to join"
            )
        columns = self.aux_hidden.shape[1]
        if aux_hidden is not None and (aux_hidden.shape != (columns,) or not has_states(aux_hidden)):
            raise ConfigError(f"join: the hidden state is {described(aux_hidden)}, expected [{columns}] floats")
        token = torch.as_tensor(token_id)
        if token.dim() or not has_rows(token) or token.is_floating_point():
            raise ConfigError(f"join: token_id is {described(token)}: give one integer, or a tensor without dimensions")
        own = self.aux_hidden[row * self.query_len : (row + 1) * self.query_len]
        own.zero_()  # rows without a token write KV past the request's end: zeros make it the same in every mode
        if aux_hidden is not None:
            own[0].copy_(aux_hidden)
        self.sampled_token_ids[row, 0].copy_(token)
        self.num_sampled[row].fill_(1)


_DRAFT_TOKENS = {
    "token_ids": "int64 [n, K]",
    "probs": "float32 [n, K, draft_vocab] or None",
    "parents": "int64 [n, K] or None",
    "confidence": "float32 [n, K] or None",
}


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """The result of one propose."""

    token_ids: Tensor
    """int64 [n, K]. For a tree of N rows int64 [n, N - 1]: its nodes, parents before children."""
    probs: Tensor | None
    """float32 [n, K, draft_vocab]: the distributions that drafts were drawn from. None if drafts are greedy."""
    dispatch: Dispatch
    """The padded size that the propose ran at, and whether it ran as a graph."""
    parents: Tensor | None = None
    """int64 [n, N - 1]: the row that each node of a tree follows. Row 0 is the request's last token, row i + 1 the node
    of column i. None for chains."""
    confidence: Tensor | None = None
    """float32 [n, K]: the chance that each draft token is accepted if all before it are. None if the head does not
    estimate it."""

    def __post_init__(self) -> None:
        given = {"token_ids": self.token_ids, "probs": self.probs, "parents": self.parents}
        check_forms("DraftTokens", given | {"confidence": self.confidence}, _DRAFT_TOKENS)
        check("DraftTokens: dispatch", self.dispatch, Dispatch)

    def clone(self) -> DraftTokens:
        """Return a copy in memory of its own."""
        probs = None if self.probs is None else self.probs.clone()
        parents = None if self.parents is None else self.parents.clone()
        confidence = None if self.confidence is None else self.confidence.clone()
        return DraftTokens(self.token_ids.clone(), probs, self.dispatch, parents, confidence)

    @property
    def query_len(self) -> int:
        """Rows per request of the verify of these drafts, as the next propose takes them: K + 1."""
        return self.dispatch.descriptor.num_speculative_tokens + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuffers(Buffers):
    """The persistent memory of `ProposeBatch`, for up to R requests of up to Q rows.

    The target's graphs or the host engine write it. The graphs of target and drafter read it. Tensors with rows per
    request are packed for the current query_len, so that views of every query_len are contiguous.
    """

    results: Once
    """int64: the memory that sampled_token_ids, num_sampled and rows_without_block are views of. One copy brings all
    three to the host."""
    sampled_token_ids: PerRow
    """int64 [R * Q]"""
    num_sampled: PerRequest
    """int32 [R]"""
    rows_without_block: Once
    """int64 [1]: counted by every propose, see `Drafter.rows_without_block`."""
    start_positions: PerRequest
    """int64 [R]. In a verify, a request with a negative position is inert."""
    aux_hidden: PerRow
    """[R * Q, aux_size]"""
    block_table: PerRequest
    """int32 [R, max_blocks]"""
    temperature: PerRequest
    """float32 [R]"""
    seeds: PerRequest
    """int64 [R]"""
    sampling: LogitsAdjustment | None = None
    """The adjustment of each request's logits. The caller that admits requests writes it. None if there is none."""
    logprobs: PerRow | None = None
    """float32 [R * Q]: the log-probabilities of the sampled tokens. None if no log-probabilities are kept."""

    def sliced(self, num_requests: int, query_len: int) -> ProposeBatch:
        """Return views of the first `num_requests` requests of a batch of `query_len` rows per request."""
        views = self.views(num_requests, rows=query_len)
        given = {field.name: getattr(views, field.name) for field in fields(ProposeBatch)}
        return ProposeBatch(**given | {"sampled_token_ids": views.sampled_token_ids.view(num_requests, query_len)})

    def load(self, batch: ProposeBatch, into: ProposeBatch, needs_sampling: bool) -> None:
        """Copy a host engine's own tensors to this memory, see `copy_batch`. into: this memory, sliced to the batch."""
        if batch.aux_hidden.requires_grad:  # the target ran with autograd: its history must not stay in this memory
            batch = replace(batch, aux_hidden=batch.aux_hidden.detach())
        copy_batch(ops.load_batch.on(self.seeds.device), batch, into, self, needs_sampling)


def copy_batch(
    load_batch: Callable[..., None],
    source: ProposeBatch,
    into: ProposeBatch,
    memory: ProposeBatch | SharedBuffers,
    needs_sampling: bool,
) -> None:
    """Copy a batch to the drafter's own memory with one op. The caller has checked the shapes.

    Args:
        load_batch: `ops.load_batch`, or the function that it runs on the device (`Op.on`).
        into: `memory`, sliced to the requests of `source`. The other requests of `memory` become inert.
        needs_sampling: copy temperatures and seeds too, each with a copy of its own.
    """
    counts = source.num_sampled, source.start_positions
    given = BatchTensors(source.sampled_token_ids, *counts, source.aux_hidden, source.block_table)
    counts = memory.num_sampled, memory.start_positions
    load_batch(given, BatchTensors(into.sampled_token_ids, *counts, memory.aux_hidden, memory.block_table))
    for name in ("temperature", "seeds") if needs_sampling else ():
        getattr(into, name).copy_(getattr(source, name))


def allocate_shared(
    config: DraftConfig,
    query_lens: Sequence[int],
    aux_size: int,
    dtype: torch.dtype,
    device: torch.device,
    sampling: LogitsAdjustment | None,
) -> SharedBuffers:
    """Allocate the memory of the largest batch of `config`, without log-probabilities. Every request is inert.

    Args:
        query_lens: rows per request that batches may have, ascending.
        aux_size: columns of the target's hidden states; 0 if no drafter reads them.
    """
    requests, rows = config.max_num_requests, config.max_num_requests * query_lens[-1]

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    results = zeros(rows + -(-requests // 2) + 1)
    return SharedBuffers(
        results=results,
        sampled_token_ids=results[:rows],
        num_sampled=results[rows:].view(torch.int32)[:requests],
        rows_without_block=results[-1:],
        start_positions=zeros(requests) - 1,
        aux_hidden=zeros(rows, aux_size, dtype=dtype),
        block_table=allocate_block_table(requests, config.max_blocks, device),
        temperature=zeros(requests, dtype=torch.float32),
        seeds=zeros(requests),
        sampling=sampling,
    )
