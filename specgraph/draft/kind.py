"""A kind of drafter: the protocol of its heads, the programs that draft with them, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from specgraph.capture import AttentionStack
from specgraph.config import DraftConfig
from specgraph.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from specgraph.draft.batch import SharedBuffers
    from specgraph.draft.head_checks import HeadCheck
    from specgraph.draft.program import DraftProgram
    from specgraph.draft.protocol import Head

HeadT = TypeVar("HeadT", bound="Head")


@dataclass(frozen=True)
class Kind(Generic[HeadT]):
    """One way of drafting. A head names it: `kind = ChainKind()`.

    Each subclass is in the file of its program and its buffers, in this package or in any other. Two kinds are equal if
    they have the same class.
    """

    protocol: ClassVar[type[Any]]
    """The protocol of its heads."""
    chains: ClassVar[type[DraftProgram[Any, Any]]]
    """The program of chains."""
    trees: ClassVar[type[DraftProgram[Any, Any]] | None] = None
    """The program of trees. None if the kind drafts no trees."""
    position_offset: ClassVar[int] = 0
    """Added to the positions of a batch's rows. 0: the row that takes the token at position p stores its key at p - 1
    (EAGLE). 1: at p (language models)."""
    has_probs: ClassVar[bool] = True
    """True if drafts can be drawn from a distribution."""
    is_one_pass: ClassVar[bool] = False
    """True if one forward pass drafts all K tokens."""

    def programs(
        self, head: HeadT, stack: AttentionStack, config: DraftConfig, memory: SharedBuffers
    ) -> dict[bool, DraftProgram[Any, Any]]:
        """Make the draft programs of a head: for chains (False), for trees (True), or both if the schedule drafts both.
        They share `memory`.

        Raises ConfigError if the head cannot draft K tokens. Raises UnsupportedError if the head or the attention
        cannot draft trees.
        """
        self.check_limits(head, config, stack)
        tree, offset = config.tree, self.position_offset
        programs = {False: self.chains(head, stack, config, memory, None, offset)} if config.chain_lens else {}
        if tree is not None and self.trees is not None:
            programs[True] = self.trees(head, stack, config, memory, tree, offset)
        return programs

    def check_limits(self, head: HeadT, config: DraftConfig, stack: AttentionStack) -> None:
        """Raise ConfigError if the head cannot draft K tokens, or drafts fewer different ones than a node of the tree
        has. Raise UnsupportedError if the head or the attention cannot draft trees."""
        if config.tree is not None and self.trees is None:
            raise UnsupportedError(self.no_trees(head))
        if config.tree is not None and config.tree.top_k > head.draft_vocab_size:
            tokens = f"{type(head).__name__} drafts {head.draft_vocab_size} tokens"
            raise ConfigError(f"a draft tree of top_k {config.tree.top_k}, and {tokens}: give a smaller top_k")

    def no_trees(self, head: HeadT) -> str:
        """Return the error text for a head that cannot draft trees: why, and what to do."""
        return f"a {type(head).__name__} drafts chains: leave out the draft tree"

    def check(self, check: HeadCheck) -> None:
        """Run each method of a head once over zeros. Raises ConfigError if a result violates the protocol."""
        raise NotImplementedError

    def bytes_per_block(self, head: HeadT, num_speculative_tokens: int, block_size: int) -> int:
        """Return the bytes that the program keeps per KV block besides keys and values."""
        return 0
