"""The shape of draft trees; importing it does not import torch, so that commands refuse a wrong one at once."""

from __future__ import annotations

from dataclasses import dataclass

from specgraph.errors import ConfigError
from specgraph.validation import Count, checked_fields

MAX_TREE_LEN = 64
"""Bits in a word of `AttentionMetadata.ancestors`."""


@checked_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """The shape of the trees that are drafted, in SGLang's terms; see docs/adr/0007-draft-trees.md.

    Raises:
        ConfigError: a number is out of range.
    """

    num_steps: Count
    """S: draft steps, the depth of the deepest node (speculative_num_steps)."""
    top_k: Count
    """k: tokens that follow each expanded node, and nodes that each later step expands (speculative_eagle_topk)."""
    num_draft_tokens: Count
    """N: rows per request in a verify, the request's last token and N - 1 nodes (speculative_num_draft_tokens)."""

    def __post_init__(self) -> None:
        s, k, n = self.num_steps, self.top_k, self.num_draft_tokens
        asked = f"speculative_num_steps {s}, speculative_eagle_topk {k}, speculative_num_draft_tokens {n}"
        if not s + 1 <= n <= self.num_candidates + 1:
            raise ConfigError(
                f"{asked}: speculative_num_draft_tokens counts the last token and the nodes of the tree, so it is "
                f"{s + 1} (one path) to {self.num_candidates + 1} (all that is drawn)"
            )
        if max(n, self.step_keys) > MAX_TREE_LEN:
            raise ConfigError(
                f"{asked}: a verify may have {MAX_TREE_LEN} rows per request and the draft steps after the first "
                f"{MAX_TREE_LEN} together, here (steps - 1) * topk = {(s - 1) * k}; ask for a smaller tree"
            )

    def __str__(self) -> str:
        return f"{self.num_steps}, {self.top_k}, {self.num_draft_tokens}"

    @property
    def num_candidates(self) -> int:
        """C: tokens that are drawn, of which the N - 1 best are verified."""
        return self.top_k + (self.num_steps - 1) * self.top_k**2

    @property
    def step_keys(self) -> int:
        """Keys per request that the draft steps after the first write behind the context; at least 1."""
        return max(1, (self.num_steps - 1) * self.top_k)

    @property
    def scratch_tokens(self) -> int:
        """KV slots per request behind its tokens for the nodes of a tree: a node of a permitted depth may lie past
        max_model_len."""
        return max(self.num_draft_tokens, self.step_keys)
