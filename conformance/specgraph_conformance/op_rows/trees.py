"""Rows of the ops that draw, place and verify draft trees."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from specgraph import ops
from specgraph_run.decoder import ops as decoder_ops
from torch import Tensor

from specgraph_conformance.op_rows.passes import PLACES, expect_rows
from specgraph_conformance.op_table import FLOATS, Run, Table, expect_reference
from specgraph_conformance.rig import slot_of

TABLE = Table()
BLOCK = 16


def full(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor that an op is to write."""
    return torch.full(shape, -77, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Search:
    """The sizes of a tree search: tokens per row (`k`), draft steps, and chosen nodes."""

    k: int
    steps: int
    nodes: int
    vocab: int
    ties: tuple[int, ...]
    """The tokens that are equally likely, and the best, in every row of request 1."""
    dtype: torch.dtype = torch.float32

    def logits(self, rows: int, g: torch.Generator) -> Tensor:
        """Return [3, rows, vocab]: random logits of request 0, with `ties` as the best of request 1, all equal of
        request 2."""
        out = torch.randn(3, rows, self.vocab, generator=g).to(self.dtype)
        out[1, :, list(self.ties)] = 4.0 if self.vocab < 100 else 9.0
        out[2] = 0.0
        return out


TIES_OF_BLOCKS = (8191, 5, 4096, 8192, 4095)
"""Tokens on both sides of the borders between blocks of 4,096 columns."""


@TABLE.row(
    "grow-tree",
    "Candidates, expanded nodes and chosen nodes are those of a host search; ties go to the lower id, then to the node "
    "that was drawn first.",
    hazard="node-ties-differ",
    cause="grow_tree or choose_nodes: a top-k or a sort that leaves the order of equal scores open, or a wrong parent",
)
def grow_tree(run: Run, g: torch.Generator) -> None:
    expect_grown(run, g, Search(2, 3, 7, 9, (7, 2, 5)))


@TABLE.row(
    "trees-of-a-large-vocabulary",
    "Over 9,000 tokens, trees of four tokens per row are those of a host search, whether drawn step by step or all "
    "positions in one pass.",
    hazard="large-trees",
    cause="grow_tree or draft_block_tree: blocks of columns merged wrongly, ties between them, or a score of one block",
    floats=FLOATS,
)
def large_trees(run: Run, g: torch.Generator, floats: torch.dtype) -> None:
    expect_grown(run, g, Search(4, 4, 40, 9000, TIES_OF_BLOCKS, floats))
    expect_block_tree(run, g, Search(4, 4, 40, 9000, TIES_OF_BLOCKS, floats))


def expect_grown(run: Run, g: torch.Generator, of: Search) -> None:
    """Check the tree that is drawn step by step."""
    requests, k, size = 3, of.k, of.k + (of.steps - 1) * of.k * of.k
    scores = full(requests, size, dtype=torch.float32), full(requests, k, dtype=torch.float32)
    candidates = ops.Candidates(scores[0], full(requests, size), full(requests, size))
    beams = ops.Beams(scores[1], full(requests, k), *(full(requests * k) for _ in range(3)))
    tree = ops.TreeNodes(full(requests, of.nodes), full(requests, of.nodes))
    written = [*candidates, *beams]
    for s in range(of.steps):
        logits = of.logits(k if s else 1, g)
        logits[1] = logits[1, :1]  # all rows of a step are the same
        given = logits.flatten(0, 1), torch.arange(of.vocab), torch.tensor([s]), s == 0
        expect_reference(run, ops.grow_tree, *given, candidates, beams, written=written, tolerance=1e-4)
    expect_reference(run, ops.choose_nodes, candidates, tree, written=tree)


@TABLE.row(
    "draft-block-tree",
    "The tree of a drafter that drafts all positions in one pass holds the best of all paths, by a host search; among "
    "equals the shorter path, then the one of likelier first tokens, and the lower id within a position.",
    hazard="node-ties-differ",
    cause="draft_block_tree: an order of equal scores that is left open, paths left out too early, or a wrong parent",
    quick=True,
)
def draft_block_tree(run: Run, g: torch.Generator) -> None:
    expect_block_tree(run, g, Search(3, 3, 11, 9, (7, 2, 5)))


def expect_block_tree(run: Run, g: torch.Generator, of: Search) -> None:
    """Check the tree that is drawn in one pass."""
    logits, tree = of.logits(of.steps, g).flatten(0, 1), ops.TreeNodes(full(3, of.nodes), full(3, of.nodes))
    expect_reference(run, ops.draft_block_tree, logits, torch.arange(of.vocab), of.k, tree, written=tree)


@dataclass(frozen=True, slots=True)
class Trees:
    """The draft trees of a verify, one per request."""

    tokens: list[list[int]]
    parents: list[list[int]]
    """For each node, the row that it follows. Row 0 is the last token, and the node of column i is row i + 1."""
    blocks: list[list[int]]
    """The KV blocks of each request. They are not in order, and the next block in memory belongs to another request."""
    starts: list[int]
    """The position of each request's last token. -1 for an inert request."""
    depth: int
    """The number of levels below the last token."""
    limit: int = 1000
    """max_model_len."""

    @property
    def rows(self) -> int:
        """The rows per request."""
        return len(self.tokens[0]) + 1

    @property
    def nodes(self) -> ops.TreeNodes:
        """The trees in the form that ops take."""
        return ops.TreeNodes(torch.tensor(self.tokens), torch.tensor(self.parents))

    def line(self, request: int, row: int) -> list[int]:
        """Return the path to a row: the rows from row 0 on."""
        return [0] if row == 0 else [*self.line(request, self.parents[request][row - 1]), row]

    def slots(self, request: int) -> list[int]:
        """Return the slot of each row."""
        room = len(self.blocks[request]) * BLOCK
        return [slot_of(self.starts[request] + i, self.blocks[request], room, BLOCK) for i in range(self.rows)]

    def begin(self, run: Run) -> ops.Rows:
        """Run `begin_rows`, with 8 as each request's last token, and check the written rows."""
        last, table = torch.full((len(self.starts), 1), 8), torch.tensor(self.blocks, dtype=torch.int32)
        given = ops.RowInputs(torch.tensor(self.starts), table, None, last, *self.nodes)
        plan = ops.RowPlan(self.rows, self.limit, BLOCK, tree_steps=self.depth)
        return expect_rows(run, plan, given, (*PLACES, "ancestors"))

    def verify(
        self, run: Run, begun: ops.Rows, logits: Tensor, acceptance: decoder_ops.Acceptance
    ) -> tuple[decoder_ops.Sampled, decoder_ops.AcceptedPath]:
        """Run `verify_tree` after `begin`, and check what it writes."""
        requests, most = len(self.starts), self.depth + 1
        sampled = decoder_ops.Sampled(full(requests, most), full(requests, dtype=torch.int32))
        path = decoder_ops.AcceptedPath(full(requests * most), *(full(requests * self.depth) for _ in range(2)))
        given = logits, self.nodes, torch.tensor(self.starts), begun.positions, begun.slot_mapping
        expect_reference(run, decoder_ops.verify_tree, *given, acceptance, sampled, path, written=[*sampled, *path])
        return sampled, path


def random_trees(rows: int, g: torch.Generator, limit: int = 1000, vocab: int = 7, depth: int = 6) -> Trees:
    """Return trees of `rows` rows for four requests. The third is inert. Children of one node have different tokens."""
    rng = random.Random(int(torch.randint(0, 1 << 30, (), generator=g)))
    trees: list[tuple[list[int], list[int]]] = []
    while len(trees) < 4:
        depths, tokens, parents = [0], list[int](), list[int]()
        taken: dict[int, set[int]] = {}
        while len(tokens) < rows - 1:
            # A parent comes before its children. Recent rows are preferred as parents, so that some paths are long.
            parent = rng.choice(range(max(0, len(tokens) - 4), len(tokens) + 1))
            if rng.random() < 0.1 or depths[parent] == depth:
                parent = rng.choice([row for row in range(len(tokens) + 1) if depths[row] < depth])
            if free := set(range(vocab)) - taken.setdefault(parent, set()):
                tokens.append(rng.choice(sorted(free)))
                taken[parent].add(tokens[-1])
                parents.append(parent)
                depths.append(depths[parent] + 1)
        trees.append((tokens, parents))
    order = rng.sample(range(1, 33), 32)
    blocks = [order[r * 8 : (r + 1) * 8] for r in range(4)]
    return Trees(
        [tokens for tokens, _ in trees], [parents for _, parents in trees], blocks, [21, 3, -1, 40], depth, limit
    )


@TABLE.row(
    "begin-tree-verify",
    "Rows of different trees have the position of their depth, a slot each, and the bits of their own ancestors.",
    hazard="ancestor-mask-shifted",
    cause="begin_rows: bits that count from the first node instead of the last token, a wrong depth, masks of 32 bits",
    quick=True,
    rows=[2, 9, 33, 64],
)
def begin_tree_verify(run: Run, g: torch.Generator, rows: int) -> None:
    random_trees(rows, g, limit=43).begin(run)


@TABLE.row(
    "places-of-many-trees",
    "For 300 requests, advance_tree moves lengths, positions and slots as a host loop does: the k rows of a step have "
    "the next k slots of their own request and one position; inert requests stay inert.",
    hazard="many-in-one-program",
    cause="advance_tree: requests past a tile, block tables read at another width, or slots counted on in memory",
    quick=True,
)
def places_of_many_trees(run: Run, g: torch.Generator) -> None:
    requests, k, tree_len, limit = 300, 8, 40, 60
    lengths = torch.randint(0, limit + 1, (requests,), generator=g)
    lengths[::7] = 0
    table = torch.randint(0, 900, (requests, 9), generator=g).int()[:, 1:7]  # a view of a wider table
    out: dict[str, Any] = {"positions": full(requests * k), "slot_mapping": full(requests * k)}
    out |= {"seq_lens": full(requests, dtype=torch.int32), "draft_step": torch.tensor([2])}
    base, limits = (lengths.int(), (lengths - 1).clamp(min=0)), {"max_model_len": limit, "block_size": BLOCK}
    expect_reference(run, ops.advance_tree, *base, table, tree_len=tree_len, **limits, **out, written=out.values())


@TABLE.row(
    "many-moves-of-kv",
    "Up to 1,500 keys and values of 8 heads change their slots at once, all read before any is written, in caches of "
    "any strides.",
    hazard="many-in-one-program",
    cause="move_kv: moves past a tile, or one that reads what another has written",
    moves=[40, 300, 1500],
)
def many_moves_of_kv(run: Run, g: torch.Generator, moves: int) -> None:
    blocks, heads, dim = 200, 8, 80
    held = torch.randn(blocks, 2, BLOCK, heads, dim, generator=g).to(torch.bfloat16)
    slots = torch.randperm((blocks - 1) * BLOCK, generator=g)[:moves] + BLOCK
    source = slots.roll(1)  # each goes to the slot of the next: copies in sequence would overwrite each other
    source[::5], to = 0, slots.clone()
    to[::5] = 0
    expect_reference(run, decoder_ops.move_kv, *held.unbind(1), source, to, written=[held])


@TABLE.row(
    "verify-tree-synthetic",
    "A tree is accepted to the depth that its chances say, whatever the target says.",
    hazard="synthetic-acceptance",
    cause="verify_tree: the chance of another place, or a live request left out",
    quick=True,
)
def verify_tree_synthetic(run: Run, g: torch.Generator) -> None:
    tree, blocks = ([4, 6, 1, 2, 3, 5, 7], [0, 0, 1, 1, 2, 3, 6]), [[9, 4, 7], [2, 3, 8], [6, 5, 1]]
    trees = Trees([tree[0]] * 3, [tree[1]] * 3, blocks, [14, -1, 20], 4, limit=34)
    logits = torch.randn(3 * trees.rows, 12, generator=g)
    acceptance = decoder_ops.Acceptance(seeds=torch.tensor([1, 2, 3]), chances=torch.tensor([1.0, 1.0, 0.0, 1.0]))
    sampled, _ = trees.verify(run, trees.begin(run), logits, acceptance)
    assert sampled.num_sampled.tolist() == [3, 0, 3]


@TABLE.row(
    "trees-of-many-rows",
    "In a batch of different trees of up to 64 rows each row has the position and the bits of its own path, and those "
    "drawn so far attend to it as in float64, whatever lies in the slots of nodes to come.",
    hazard="trees-of-one-shape",
    cause="masks of 32 bits or a sign bit, another request's parents, or NaN in slots that no row sees",
    kind=[33, 64],
)
def trees_of_many_rows(run: Run, g: torch.Generator, kind: int) -> None:
    trees = random_trees(kind, g)
    begun = trees.begin(run)
    for drawn_so_far in (kind // 2, kind):
        expect_attention(run, g, trees, begun, drawn_so_far)


def expect_attention(run: Run, g: torch.Generator, trees: Trees, begun: ops.Rows, drawn_so_far: int) -> None:
    """Check that the first `drawn_so_far` rows of each tree attend to the context and to their own paths only."""
    rows, heads, dim, requests = trees.rows, 2, 32, len(trees.starts)
    query = torch.randn(requests * drawn_so_far, heads, dim, generator=g)
    caches = [torch.randn(33, BLOCK, 1, dim, generator=g) for _ in range(2)]
    for r, start in enumerate(trees.starts):
        # No row drawn so far may see the slots of later nodes.
        for slot in trees.slots(r)[drawn_so_far:] if start >= 0 else ():
            for cache in caches:
                cache.view(-1, dim)[slot] = float("nan")
    assert begun.ancestors is not None
    words = begun.ancestors.view(requests, rows)[:, :drawn_so_far].flatten()
    table = torch.tensor(trees.blocks, dtype=torch.int32)
    assert begun.seq_lens is not None
    lengths = ops.DeviceLengths(
        begun.seq_lens, torch.arange(requests + 1, dtype=torch.int32) * drawn_so_far, drawn_so_far
    )
    mask = ops.Mask(causal=False, ancestors=words, tree_len=rows)
    given = query, ops.KVCache(*caches), table, lengths, mask
    seen = expect_reference(run, ops.paged_attention, *given, scale=0.3, tolerance=1e-3)
    assert not seen.view(requests, -1)[[start < 0 for start in trees.starts]].any(), "an inert request has output"


@TABLE.row(
    "verify-tree",
    "The path that the target's most likely tokens follow is accepted, and its keys and values move to consecutive "
    "slots.",
    hazard="path-kv-not-moved",
    cause="verify_tree or move_kv: the wrong child, a path that goes on after a miss, or keys left behind",
    kind={"greedy": (12, False)},
)
@TABLE.row(
    "paths-of-many-trees",
    "In a batch of different trees, greedy and sampled, each request accepts the path of its own tree that the "
    "target's tokens follow, drawn with the noise of their positions; slots that are not on a path stay.",
    hazard="trees-of-one-shape",
    cause="verify_tree: another request's parents, noise of the row instead of the position, or moves behind the path",
    kind={"12": (12, True), "64": (64, True)},
)
def paths_of_many_trees(run: Run, g: torch.Generator, kind: tuple[int, bool]) -> None:
    (rows, is_sampled), vocab = kind, 7
    trees, seeds = random_trees(rows, g), torch.tensor([1 << 40, -5, 3, 77])
    warm = torch.tensor([0.8, 0.0, 1.0, 0.5]) * is_sampled
    logits = torch.randn(len(trees.starts), rows, vocab, generator=g) * 2
    for r in range(len(trees.starts)):  # the target agrees with the first nodes of the longest path
        longest = max((trees.line(r, row) for row in range(rows)), key=len)
        for parent, child in pairwise(longest[: 4 + r]):
            logits[r, parent, trees.tokens[r][child - 1]] += 9.0
    acceptance = decoder_ops.Acceptance(warm, seeds) if is_sampled else decoder_ops.Acceptance()
    sampled, path = trees.verify(run, trees.begin(run), logits.flatten(0, 1), acceptance)
    assert int(sampled.num_sampled.max()) > 3, "no path has three drafts"
    before = torch.arange(33.0 * BLOCK).view(33, BLOCK, 1, 1)
    keys, values = before.clone(), -before
    moves = path.from_slots, path.to_slots
    expect_reference(run, decoder_ops.move_kv, keys, values, *moves, written=(keys, values))
    assert not torch.equal(keys, before), "no keys move"
