"""The verify program: the target's pass over the last token of each request and its drafts, and their acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specgraph_models.target import Target, TargetOutput
from torch import Tensor

from specgraph import ops
from specgraph.attention.choose import check_trees
from specgraph.capture import AttentionStack, BatchDescriptor, MakeAttend, Phase, Program, Work
from specgraph.config import DraftConfig
from specgraph.draft import Drafter, DraftTree, SharedBuffers
from specgraph.draft.logits import most_likely
from specgraph.draft.program import present
from specgraph.errors import ConfigError, UnsupportedError
from specgraph_run.decoder import ops as decoder_ops
from specgraph_run.decoder.move_rows import move_rows
from specgraph_run.decoder.sampling_buffers import SamplingBuffers
from specgraph_run.decoder.states import RequestStates
from specgraph_run.decoder.verify_buffers import VerifyBuffers, allocate_verify, logprobs_of
from specgraph_run.decoder.verify_rows import ToVerify, TreeRows, VerifyRows
from specgraph_run.options import DecoderOptions


class VerifyProgram(Program):
    """The target's pass over the last token of each request and its drafts, and the acceptance of the drafts.

    After the verify of a tree, the keys and values of the accepted path are moved to the slots of their positions. The
    drafter then gets the same tensors as after a chain of K = S drafts, S the depth of the tree.
    """

    phase: Phase = "verify"

    def __init__(
        self,
        target: Target,
        stack: AttentionStack,
        config: DraftConfig,
        options: DecoderOptions,
        states: RequestStates | None,
        sampling: SamplingBuffers | None,
        query_lens: Sequence[int],
        drafter: Drafter | None,
        memory: SharedBuffers,
        tree: DraftTree | None = None,
    ) -> None:
        """
        Args:
            stack: the target's attention and KV caches.
            states: the states of its recurrent layers. None if it has none.
            sampling: the sampling parameters of the requests. None if they have none.
            query_lens: the numbers of rows per request that the results of a verify may have, ascending.
            drafter: the drafter of the verified drafts. None if the target decodes alone.
            memory: the buffers that the target's verify programs and the drafter share.
            tree: the shape of the drafts. None for chains.

        Raises:
            ConfigError: verifies are ragged, and the drafter has no confidence.
            UnsupportedError: drafts are trees, and the attention has no ancestor mask; or verifies are ragged, and
                the attention takes lengths from the host.
        """
        if options.verified_drafts is not None:
            _check_ragged(stack, drafter)
        if tree is not None:
            check_trees(stack.backend, stack.layers, target.dtype, config.block_size)
        self.target, self.config, self.options, self.tree = target, config, options, tree
        self.states = states
        self.aux_layers: Sequence[int] = () if drafter is None else drafter.head.aux_layers
        self._caches, self._query_lens, self._sampling = stack.caches, query_lens, sampling
        self._vocab_map = None if drafter is None else drafter.head.draft_to_target
        self.buffers = allocate_verify(config, options, query_lens, drafter, memory, tree)

    def sliced(self, num_requests: int, query_len: int, verified: int = 0) -> VerifyBuffers:
        """Return the buffers of the first `num_requests` requests.

        Args:
            query_len: rows per request of the results.
            verified: the number of verified drafts in all. 0 for all drafts of the requests.
        """
        return self.buffers.sliced(num_requests, query_len, self.rows(query_len), verified)

    def verified(self, num_requests: int, query_len: int) -> int:
        """Return the number of drafts that a pass over a padded batch takes, for results of `query_len` rows per
        request. 0 if it takes all, as in `BatchDescriptor.verified`."""
        average = self.options.verified_drafts
        num_drafts = num_requests * (self.rows(query_len) - 1)
        return 0 if average is None else min(num_drafts, max(1, int(num_requests * average)))

    def rows(self, query_len: int) -> int:
        """Return the rows per request of a pass whose results have `query_len` rows. A chain has the same number. A
        tree has a row per node."""
        return query_len if self.tree is None else self.tree.num_draft_tokens

    def batches(self) -> list[BatchDescriptor]:
        """Return every captured size with every `query_len`, largest first."""
        tree = self.tree is not None
        return [
            BatchDescriptor(
                "verify", size, self.rows(length), length - 1, tree=tree, verified=self.verified(size, length)
            )
            for size in reversed(self.config.sizes)
            for length in reversed(self._query_lens)
        ]

    def make_inert(self) -> None:
        self.buffers.shared.start_positions.fill_(-1)

    def named_tensors(self) -> Mapping[str, Tensor]:
        named = self.buffers.shared.named_tensors("shared")
        named |= self.buffers.named_tensors("verify" if self.tree is None else "tree_verify")
        return named if self._vocab_map is None else {**named, "draft_to_target": self._vocab_map}

    def work_of(self, batch: BatchDescriptor) -> Work:
        """Return the work of a pass: fill the rows, run the target, copy hidden states for the drafter, accept."""
        query_len = batch.num_speculative_tokens + 1
        b = self.sliced(batch.num_requests, query_len, batch.verified)

        def work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            self._begin(b, query_len)
            recur = None
            if self.states is not None:
                recur = self.states.begin(b.batch.start_positions, None, b.batch.block_table, query_len, commits=False)
            out = self.target.forward(b.token_ids, make_attend(b.metadata, 0), self.aux_layers, recur)
            hidden = self.drafter_hidden(out)
            if b.path is None and b.batch.aux_hidden.shape[1]:
                b.batch.aux_hidden.copy_(b.by_row(hidden))
            self._accept(b, out.hidden)
            if b.path is not None:
                ops.take_rows(hidden, b.path.rows, b.batch.aux_hidden)
                move_rows(self.target.attention_layers, self._caches, b.path.from_slots, b.path.to_slots)

        return work

    def drafter_hidden(self, out: TargetOutput) -> Tensor:
        return out.aux_hidden if self.aux_layers else out.hidden

    def _begin(self, b: VerifyBuffers, query_len: int) -> None:
        """Fill the rows: the last token of each request, then its drafts."""
        at, rows, limits = b.metadata, self.rows(query_len), self.config.limits
        given = ToVerify(b.batch.start_positions, b.batch.block_table, b.last_token_ids, b.draft_token_ids)
        if self.tree is None:
            VerifyRows.of(rows, limits).fill(given, at.places, b.token_ids, b.ragged)
        else:
            nodes = present(b.draft_parents), at.places, b.token_ids, present(at.ancestors)
            TreeRows.of(rows, limits, self.tree.num_steps).fill(given, *nodes)

    def _accept(self, b: VerifyBuffers, hidden: Tensor) -> None:
        """Write the sampled tokens and their counts, and for a tree the accepted path."""
        out, drafts, starts = self.target.projection, b.draft_token_ids, b.batch.start_positions
        sampled = decoder_ops.Sampled(b.batch.sampled_token_ids, b.batch.num_sampled)
        if out is not None and (ranks := out.split_over) is not None and not self._needs_logits:
            best = most_likely(out.logits(hidden), ranks)
            decoder_ops.accept_greedy(b.by_row(best), drafts, starts, sampled)
            return
        logits = b.by_row(self.target.logits(hidden))
        adjusted, sampling = logits, self._sampling
        if sampling is not None:
            sampling = sampling.sliced(slice(0, starts.shape[0]))
            given = logits, present(b.batch.temperature), sampling, drafts, b.metadata.ancestors
            adjusted = decoder_ops.adjust_logits(*given)
        if b.path is None:
            decoder_ops.verify_drafts(adjusted, drafts, starts, self._acceptance(b), sampled)
        else:
            nodes = ops.TreeNodes(drafts, present(b.draft_parents))
            places = b.metadata.positions, b.metadata.slot_mapping
            decoder_ops.verify_tree(adjusted, nodes, starts, *places, self._acceptance(b), sampled, b.path)
        if sampling is not None:
            decoder_ops.count_tokens(sampled.token_ids, sampling.output_counts)
        logprobs = logprobs_of(b.shared, *sampled.token_ids.shape)
        if logprobs is not None:
            decoder_ops.emitted_logprobs(logits if b.path is None else logits[b.path.rows], sampled.token_ids, logprobs)

    @property
    def _needs_logits(self) -> bool:
        """True if acceptance needs more than the best token of each row. If not, ranks exchange no logits."""
        options = self.options
        draws = self.config.sampled or options.synthetic_acceptance is not None
        return draws or options.sampling_parameters or options.logprobs or self.tree is not None

    def _acceptance(self, b: VerifyBuffers) -> decoder_ops.Acceptance:
        if b.synthetic_acceptance is not None:
            return decoder_ops.Acceptance(seeds=present(b.batch.seeds), chances=b.synthetic_acceptance)
        if not self.config.sampled:
            return decoder_ops.Acceptance()
        return decoder_ops.Acceptance(
            present(b.batch.temperature), present(b.batch.seeds), b.draft_probs, self._vocab_map
        )


def _check_ragged(stack: AttentionStack, drafter: Drafter | None) -> None:
    if drafter is None or drafter.buffers.confidence is None:
        who = "decoding has no drafter" if drafter is None else f"the drafter {type(drafter.head).__name__} says none"
        raise ConfigError(
            f"verified_drafts splits a verify by the confidence of drafts, and {who}: leave it out, or give a DSpark "
            "drafter with a confidence head"
        )
    if stack.backend.host_parameters:
        raise UnsupportedError(
            f"verified_drafts: attention '{stack.backend.name}' takes lengths from the host, which doesn't know how "
            "many drafts of each request are verified; leave one of the two out"
        )
