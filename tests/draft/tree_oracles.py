"""The oracle of draft trees: all nodes that the search of one request considers, with dense attention, in float64.

Each node's path is drafted alone, as a chain. The oracle thus needs no ancestor mask, slot or buffer, and shares none
with the code under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from specgraph_conformance.draft_oracles import Context
from specgraph_conformance.oracles import DenseKeys
from torch import Tensor

from specgraph.draft import DraftTree
from specgraph.draft.protocol import DraftHead

Path = tuple[int, ...]
"""The target ids on the path to a node, from the first draft token to the node itself."""


_Row = tuple[Tensor, Tensor, list[Tensor], list[Tensor]]
"""The results of the row of a path's last token: hidden state, carried state, and all keys and values up to it."""


@dataclass(frozen=True, slots=True)
class DenseTree:
    """The nodes to verify for one request."""

    paths: set[Path]
    margin: float
    """The smallest difference of scores that decided about a token, an expanded node or a chosen node. If it is not far
    above the device's rounding, another tree is as good."""


class PathLogits:
    """The float64 log-probabilities of the token after each path, found by drafting that path alone."""

    def __init__(self, head: DraftHead, context: Context) -> None:
        self.head, self.end = head, context.start + len(context.token_ids)
        dense = DenseKeys(head.attention_layers, context.keys, context.values)
        dense.at(range(context.start, self.end))
        out = head.forward(context.token_ids, head.combine(context.aux_hidden.double()), dense.attend)
        self._known: dict[Path, _Row] = {(): (out.hidden[-1:], out.carry[-1:], dense.keys, dense.values)}

    def log_probs(self, path: Path) -> Tensor:
        """Return the log-probabilities after a path, [draft_vocab]."""
        return torch.log_softmax(self.head.logits(self._row(path)[0])[0], dim=-1)

    def _row(self, path: Path) -> _Row:
        if path not in self._known:
            _, carry, keys, values = self._row(path[:-1])
            dense = DenseKeys(self.head.attention_layers, keys, values)
            dense.at([self.end + len(path) - 1])
            out = self.head.forward(torch.tensor([path[-1]]), carry, dense.attend)
            self._known[path] = out.hidden, out.carry, dense.keys, dense.values
        return self._known[path]


def dense_tree(logits: PathLogits, tree: DraftTree) -> DenseTree:
    """Search the tree step by step over the whole draft vocabulary."""
    offsets = logits.head.draft_to_target
    margins: list[float] = []

    def best(found: list[tuple[float, Path]], count: int) -> list[tuple[float, Path]]:
        ranked = sorted(found, key=lambda node: -node[0])
        if count < len(ranked):
            margins.append(ranked[count - 1][0] - ranked[count][0])
        return ranked[:count]

    beams, every = [(0.0, Path())], list[tuple[float, Path]]()
    for _ in range(tree.num_steps):
        drawn: list[tuple[float, Path]] = []
        for score, path in beams:
            following = [
                (score + value, (*path, token + (0 if offsets is None else int(offsets[token]))))
                for token, value in enumerate(logits.log_probs(path).tolist())
            ]
            drawn += best(following, tree.top_k)
        every += drawn
        beams = best(drawn, tree.top_k)
    chosen = best(every, tree.num_draft_tokens - 1)
    return DenseTree({path for _, path in chosen}, min(margins, default=float("inf")))


def block_tree(logits: Tensor, draft_to_target: Tensor | None, tree: DraftTree) -> DenseTree:
    """Return the tree of a drafter that drafts all positions in one pass, from all paths through each position's top-k
    tokens.

    Args:
        logits: float64 [S, draft_vocab].
        draft_to_target: the offset of each draft id. None if drafter and target share a vocabulary.
    """
    levels, margins = list[list[tuple[float, int]]](), list[float]()
    for row in torch.log_softmax(logits, dim=-1).tolist():
        ranked = sorted(((value, token) for token, value in enumerate(row)), reverse=True)
        margins += [a[0] - b[0] for a, b in zip(ranked[tree.top_k - 1 :], ranked[tree.top_k :][:1], strict=False)]
        offset = [0] * len(row) if draft_to_target is None else draft_to_target.tolist()
        levels.append([(value, token + offset[token]) for value, token in ranked[: tree.top_k]])
    every: list[tuple[float, Path]] = []
    for length in range(1, tree.num_steps + 1):
        for nodes in product(*levels[:length]):
            every.append((sum(value for value, _ in nodes), tuple(token for _, token in nodes)))
    every.sort(key=lambda node: -node[0])
    count = tree.num_draft_tokens - 1
    margins += [a[0] - b[0] for a, b in zip(every[count - 1 :], every[count:][:1], strict=False)]
    return DenseTree({path for _, path in every[:count]}, min(margins, default=float("inf")))


def paths_of(token_ids: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """Return the path to each node of a tree, in the form of `DraftTokens`."""
    paths: list[Path] = [()]
    for token, parent in zip(token_ids, parents, strict=True):
        assert 0 <= parent < len(paths), f"node {len(paths)} follows row {parent}, which does not come before it"
        paths.append((*paths[parent], token))
    return paths[1:]
