"""The buffers and draws that draft programs of one pass have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from specgraph import ops
from specgraph.attention import AttentionMetadata
from specgraph.buffers import Axes
from specgraph.config import DraftTree
from specgraph.draft.buffers import Allocation, DraftBuffers
from specgraph.draft.program import draw, present
from specgraph.draft.protocol import ModelHead


@dataclass(frozen=True, kw_only=True)
class OnePassBuffers(DraftBuffers):
    """The rows of the one pass."""

    step: Annotated[AttentionMetadata, Axes("block")]
    step_token_ids: Annotated[Tensor, Axes("block")]
    """int64 [R * rows of the pass]"""


def pass_fields(new: Allocation) -> dict[str, Any]:
    """Return the fields of `OnePassBuffers`, as arguments of a subclass."""
    return new.common() | {"step": new.metadata("block"), "step_token_ids": new.rows("block")}


def draft_block(head: ModelHead, b: DraftBuffers, hidden: Tensor, tree: DraftTree | None) -> None:
    """Draw K tokens per request, or a tree of K levels, from hidden states [R * K, hidden_size]. No draw depends on
    another one."""
    if tree is not None:
        nodes = ops.TreeNodes(b.draft_token_ids, present(b.draft_parents))
        ops.draft_block_tree(head.logits(hidden), head.draft_to_target, tree.top_k, nodes)
        return
    drafts = ops.Drafts(b.draft_token_ids, head.draft_to_target)
    draw(head, b, hidden, drafts, (b.inputs.start_positions, b.inputs.num_sampled))
