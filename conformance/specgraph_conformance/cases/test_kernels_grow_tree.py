"""The ops that draw draft trees against a host search, eagerly and in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from operator import itemgetter

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, on_host, run_op


@dataclass(frozen=True, slots=True)
class Search:
    """The sizes of a search: k tokens per row, steps, chosen nodes."""

    k: int
    steps: int
    nodes: int
    vocab: int
    ties: tuple[int, ...]
    """Tokens that are equally the best in every row of request 1."""
    dtype: torch.dtype = torch.float32

    def logits(self, rows: int, seed: int) -> Tensor:
        """[3, rows, vocab]: of request 0 at random; of request 1 `ties` are the best; of request 2 all are equal."""
        generator = torch.Generator().manual_seed(seed)
        out = torch.randn(3, rows, self.vocab, generator=generator).to(self.dtype)
        out[1, :, list(self.ties)] = 4.0 if self.vocab < 100 else 9.0
        out[2] = 0.0
        return out


SMALL_VOCAB = 9
TIES_OF_BLOCKS = (8191, 5, 4096, 8192, 4095)
"""On both sides of the borders of blocks of 4,096 columns."""


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.grow-tree",
    "Candidates, expanded nodes and chosen nodes are those of a host search; ties go to the lower id, then to the node "
    "that was drawn first.",
    hazard="node-ties-differ",
    cause="grow_tree or choose_nodes: a top-k or a sort that leaves the order of equal scores open, or a wrong parent",
)
def test_grow_tree(platform: Platform, way: str, seed: int) -> None:
    _grow(platform, way, Search(2, 3, 7, SMALL_VOCAB, (7, 2, 5)), seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.trees-of-a-large-vocabulary",
    "Over 9,000 tokens, trees of four tokens per row are those of a host search, whether drawn step by step or all "
    "positions in one pass.",
    hazard="large-trees",
    cause="grow_tree or draft_block_tree: blocks of columns merged wrongly, ties between them, or a score of one block",
)
def test_large(platform: Platform, way: str, dtype: torch.dtype, seed: int) -> None:
    _grow(platform, way, Search(4, 4, 40, 9000, TIES_OF_BLOCKS, dtype), seed)
    _draw_block(platform, way, Search(4, 4, 40, 9000, TIES_OF_BLOCKS, dtype), seed)


def _grow(platform: Platform, way: str, of: Search, seed: int) -> None:
    requests, k, steps, nodes, vocab = 3, of.k, of.steps, of.nodes, of.vocab
    logits = [of.logits(1 if s == 0 else k, seed + s) for s in range(steps)]
    for each in logits:
        each[1] = each[1, :1]  # the rows of a step are alike
    offsets, size = torch.arange(vocab), k + (steps - 1) * k * k
    device = platform.device

    def full(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, -77, dtype=dtype, device=device)

    node = {"node_scores": full(requests, size, dtype=torch.float32)}
    node |= {name: full(requests, size) for name in ("node_token_ids", "node_parents")}
    beam = {"beam_scores": full(requests, k, dtype=torch.float32), "beam_nodes": full(requests, k)}
    beam |= {name: full(requests * k) for name in ("beam_rows", "token_ids", "ancestors")}
    tokens, parents = full(requests, nodes), full(requests, nodes)
    there = [each.flatten(0, 1).to(device) for each in logits]
    numbers, mapped = [torch.tensor([s], device=device) for s in range(steps)], offsets.to(device)

    def body() -> None:
        for s in range(steps):
            ops.grow_tree(there[s], mapped, numbers[s], first=s == 0, **node, **beam)
        ops.choose_nodes(node["node_scores"], node["node_token_ids"], node["node_parents"], tokens, parents)

    run_op(platform, way, body, [*node.values(), *beam.values(), tokens, parents])
    for r in range(requests):
        drawn: list[tuple[float, int, int]] = []  # score, token, parent's number
        beams = [(0.0, -1)]
        for each in logits:
            first = len(drawn)
            for b, (score, number) in enumerate(beams):
                row, values = each[r, b].double().log_softmax(0).tolist(), each[r, b].tolist()
                best = [t for _, t in sorted((-value, t) for t, value in enumerate(values))][:k]
                drawn += [(score + row[t], t, number) for t in best]
            order = sorted(range(first, len(drawn)), key=lambda i: (-round(drawn[i][0], 4), i))
            beams = [(drawn[i][0], i) for i in order[:k]]
        chosen = sorted(sorted(range(len(drawn)), key=lambda i: (-round(drawn[i][0], 4), i))[:nodes])
        assert on_host(tokens)[r].tolist() == [2 * drawn[i][1] for i in chosen], f"tokens of request {r}"
        rows = [0 if drawn[i][2] < 0 else 1 + chosen.index(drawn[i][2]) for i in chosen]
        assert on_host(parents)[r].tolist() == rows, f"parents of request {r}"


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.draft-block-tree",
    "The tree of a drafter that drafts all positions in one pass holds the best of all paths, by a host search; among "
    "equals the shorter path, then the one of likelier first tokens, and the lower id within a position.",
    hazard="node-ties-differ",
    cause="draft_block_tree: an order of equal scores that is left open, paths left out too early, or a wrong parent",
    quick=True,
)
def test_draft_block_tree(platform: Platform, way: str, seed: int) -> None:
    _draw_block(platform, way, Search(3, 3, 11, SMALL_VOCAB, (7, 2, 5)), seed)


def _draw_block(platform: Platform, way: str, of: Search, seed: int) -> None:
    requests, k, steps, nodes = 3, of.k, of.steps, of.nodes
    logits = of.logits(steps, seed)
    tokens, parents = (torch.full((requests, nodes), -77, device=platform.device) for _ in range(2))
    there, mapped = logits.flatten(0, 1).to(platform.device), torch.arange(of.vocab, device=platform.device)
    run_op(platform, way, lambda: ops.draft_block_tree(there, mapped, k, tokens, parents), [tokens, parents])
    for r in range(requests):
        scores = logits[r].double().log_softmax(-1).tolist()
        rows: list[list[float]] = logits[r].tolist()
        best = [[t for _, t in sorted((-value, t) for t, value in enumerate(row))][:k] for row in rows]
        paths = [path for length in range(1, steps + 1) for path in product(range(k), repeat=length)]
        total = {path: sum(scores[i][best[i][j]] for i, j in enumerate(path)) for path in paths}
        ranked = sorted((-round(total[path], 4), len(path), path) for path in paths)
        chosen = [path for _, _, path in sorted(ranked[:nodes], key=itemgetter(1, 2))]
        wanted = [2 * best[len(p) - 1][p[-1]] for p in chosen]
        assert on_host(tokens)[r].tolist() == wanted, f"tokens of request {r}"
        follows = [1 + chosen.index(p[:-1]) if len(p) > 1 else 0 for p in chosen]
        assert on_host(parents)[r].tolist() == follows, f"parents of request {r}"
