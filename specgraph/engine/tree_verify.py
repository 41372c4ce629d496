"""The target's pass over draft trees, the acceptance of a path, and the path's keys and values put in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import KVCache, allocate_metadata, check_trees, move_rows
from specgraph.capture import AttentionStack, BatchDescriptor, MakeAttend
from specgraph.draft import Drafter, DraftTree
from specgraph.draft.buffers import DraftBuffers
from specgraph.draft.program import present
from specgraph.engine.config import EngineConfig, acceptance_chances
from specgraph.engine.verify import VerifyBuffers, VerifyMemory, VerifyProgram
from specgraph.models.protocol import Target
from specgraph.ops.begin_rows import RowPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeVerifyBuffers(VerifyBuffers):
    """The tensors of a verify of R requests with N rows each; `draft_token_ids` is [R, N - 1]."""

    draft_parents: Tensor
    """int64 [R, N - 1], written before a verify."""
    path_rows: Tensor
    """int64 [R * (S + 1)]: the rows of the accepted path."""
    from_slots: Tensor
    to_slots: Tensor
    """int64 [R * S]: from where to where its keys and values move."""

    def copied(self, drafts: DraftBuffers) -> list[tuple[Tensor, Tensor]]:
        """As in `VerifyBuffers`."""
        return [(self.draft_parents, present(drafts.draft_parents)[: self.draft_parents.shape[0]])]


class TreeVerifyProgram(VerifyProgram):
    """As `VerifyProgram`, over trees. What the round hands to the drafter is what a chain of K = S hands over."""

    name = "tree_verify"
    of_trees = True

    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        tree: DraftTree,
        drafter: Drafter,
        stack: AttentionStack,
        memory: VerifyMemory,
    ) -> None:
        """
        Args:
            stack: the target's attention and KV caches.

        Raises:
            UnsupportedError: the attention has no ancestor mask.
        """
        check_trees(stack.backend, stack.layers, target.dtype, config.block_size)
        super().__init__(target, config, (tree.num_steps + 1,), drafter, memory)
        self.tree, self._caches = tree, tuple[KVCache, ...](stack.caches)
        requests, rows, device = config.max_num_requests, tree.num_draft_tokens, memory.round.seeds.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._rows, self._drafts, self._probs = zeros(requests * rows), zeros(requests, rows - 1), None
        if config.synthetic_tree_acceptance is not None:
            chances = acceptance_chances(config.synthetic_tree_acceptance, tree.num_steps)
            self._chances[: tree.num_steps] = torch.tensor(chances)
        self._metadata = allocate_metadata(requests, rows, self.round.block_table, rows)
        self._tree = {
            "draft_parents": zeros(requests, rows - 1),
            "path_rows": zeros(requests * (tree.num_steps + 1)),
            "from_slots": zeros(requests * tree.num_steps),
            "to_slots": zeros(requests * tree.num_steps),
        }

    def rows(self, query_len: int) -> int:
        """N, whatever the rows of the round that is handed over."""
        return self.tree.num_draft_tokens

    def plan(self, query_len: int) -> RowPlan:
        """N rows, whatever those of the round that is handed over."""
        plan = super().plan(self.tree.num_draft_tokens)
        return plan._replace(tree_steps=self.tree.num_steps)

    def sliced(self, num_requests: int, query_len: int) -> TreeVerifyBuffers:
        """The buffers of the first `num_requests` requests: contiguous views."""
        n, s = num_requests, self.tree.num_steps
        return TreeVerifyBuffers(
            round=self.round.sliced(n, query_len),
            last_token_ids=self._last[:n],
            draft_token_ids=self._drafts[:n],
            draft_probs=None,
            token_ids=self._rows[: n * self.tree.num_draft_tokens],
            metadata=self._metadata.sliced(n),
            draft_parents=self._tree["draft_parents"][:n],
            path_rows=self._tree["path_rows"][: n * (s + 1)],
            from_slots=self._tree["from_slots"][: n * s],
            to_slots=self._tree["to_slots"][: n * s],
        )

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The buffers."""
        return {**super().named_tensors(), **{f"{self.name}.{key}": tensor for key, tensor in self._tree.items()}}

    def work_of(self, batch: BatchDescriptor) -> Callable[[Sequence[int], MakeAttend], None]:
        """Rows, the target, acceptance, the path's hidden states for the drafter, and its keys and values."""
        b, plan = self.sliced(batch.num_requests, batch.num_speculative_tokens + 1), self.plan(batch.query_len)

        def work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            self.begin(b, plan, b.draft_parents)
            out = self.target.forward(b.token_ids, make_attend(b.metadata, 0), self.aux_layers)
            self._accept_path(b, self.target.logits(out.hidden))
            ops.take_rows(out.aux_hidden if self.aux_layers else out.hidden, b.path_rows, b.round.aux_hidden)
            move_rows(self._caches, b.from_slots, b.to_slots)

        return work

    def _accept_path(self, b: TreeVerifyBuffers, logits: Tensor) -> None:
        """Write the sampled tokens, their counts, and the path."""
        asked, raw = None if self.sampling is None else self.sampling.sliced(slice(0, b.draft_parents.shape[0])), logits
        if asked is not None:
            logits = asked.adjusted(logits, b.draft_token_ids, present(b.round.temperature), b.metadata.ancestors)
        ops.verify_tree(
            logits,
            ops.TreeNodes(b.draft_token_ids, b.draft_parents),
            b.round.start_positions,
            b.metadata.positions,
            b.metadata.slot_mapping,
            self._acceptance(b),
            ops.Sampled(b.round.sampled_token_ids, b.round.num_sampled),
            ops.AcceptedPath(b.path_rows, b.from_slots, b.to_slots),
        )
        tokens = b.round.sampled_token_ids
        if asked is not None:
            ops.count_tokens(tokens, asked.output_counts)
        logprobs = self.logprobs(*tokens.shape)
        if logprobs is not None:
            ops.emitted_logprobs(raw[b.path_rows], tokens, logprobs)
