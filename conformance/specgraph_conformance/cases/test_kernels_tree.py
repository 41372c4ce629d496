"""The ops that place and verify draft trees against plain Python loops and float64, eagerly and in a graph."""

from __future__ import annotations

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, expect_equal, on_host, run_op, slot_of

PARENTS = [0, 0, 1, 1, 2, 3, 6]
"""The row that each node follows; row 0 is the last token, the node of column i is row i + 1."""
DEPTHS = [0, 1, 1, 2, 2, 2, 3, 4]
TOKENS = [4, 6, 1, 2, 3, 5, 7]
BLOCKS = [[9, 4, 7], [2, 3, 8], [6, 5, 1]]
"""Of three requests, 16 tokens each: not in order, and the next block in memory is another request's."""
BLOCK = 16


def line(row: int) -> set[int]:
    """The rows of the path to a row, itself included."""
    return {row} if row == 0 else {row} | line(PARENTS[row - 1])


def full(platform: Platform, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor to be written."""
    return torch.full(shape, -77, dtype=dtype, device=platform.device)


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.advance-tree",
    "The k rows of a draft step have the next k slots of their own request, one position and one length; inert "
    "requests stay inert.",
    hazard="tree-slot-overlaps-next-request",
    cause="advance_tree: slots counted on from the last one in memory instead of through the block table",
    quick=True,
)
def test_advance_tree(platform: Platform, way: str) -> None:
    k, limit, tree_len, base = 4, 34, 12, [14, 0, 33]
    out = {"seq_lens": full(platform, 3, dtype=torch.int32), "positions": full(platform, 3 * k)}
    out |= {"slot_mapping": full(platform, 3 * k), "draft_step": torch.tensor([1], device=platform.device)}
    inputs = (
        torch.tensor(base, dtype=torch.int32, device=platform.device),
        torch.tensor([max(n - 1, 0) for n in base], device=platform.device),
        torch.tensor(BLOCKS, dtype=torch.int32, device=platform.device),
    )
    run_op(
        platform,
        way,
        lambda: ops.advance_tree(*inputs, tree_len=tree_len, max_model_len=limit, block_size=BLOCK, **out),
        out.values(),
    )
    seen = {name: on_host(tensor).tolist() for name, tensor in out.items()}
    assert seen["draft_step"] == [2]
    assert seen["seq_lens"] == [n + tree_len if n else 0 for n in base]
    for r, n in enumerate(base):
        slots = seen["slot_mapping"][r * k : (r + 1) * k]
        if n == 0:
            assert slots == [-1] * k, "an inert request has slots"
            continue
        assert slots == [slot_of(n + k + j, BLOCKS[r], 48, BLOCK) for j in range(k)], f"slots of request {r}"
        assert seen["positions"][r * k : (r + 1) * k] == [min(n + 1, limit - 1)] * k


class Verify:
    """`begin_tree_verify` of the tree above for each of three requests; the last token of each is 8."""

    def __init__(self, platform: Platform, starts: list[int]) -> None:
        device, rows = platform.device, 3 * len(DEPTHS)
        self.tokens, self.parents = (torch.tensor([each] * 3, device=device) for each in (TOKENS, PARENTS))
        self.starts, self.last = torch.tensor(starts, device=device), torch.tensor([8, 8, 8], device=device)
        self.table = torch.tensor(BLOCKS, dtype=torch.int32, device=device)
        names = ("token_ids", "positions", "slot_mapping", "ancestors")
        self.out = {name: full(platform, rows) for name in names} | {"seq_lens": full(platform, 3, dtype=torch.int32)}
        self.written = {"sampled_token_ids": full(platform, 3, 5), "num_sampled": full(platform, 3, dtype=torch.int32)}
        self.written |= {"path_rows": full(platform, 15)}
        self.written |= {"from_slots": full(platform, 12), "to_slots": full(platform, 12)}

    def begin(self) -> None:
        """Run the op."""
        ops.begin_tree_verify(
            self.last,
            self.tokens,
            self.parents,
            self.starts,
            self.table,
            num_steps=4,
            max_model_len=34,
            block_size=BLOCK,
            **self.out,
        )


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.begin-tree-verify",
    "Rows of a tree have the position of their depth, a slot each, and the bits of their own ancestors.",
    hazard="ancestor-mask-shifted",
    cause="begin_tree_verify: bits that count from the first node instead of the last token, or a wrong depth",
    quick=True,
)
def test_begin_tree_verify(platform: Platform, way: str) -> None:
    starts, rows = [14, -1, 32], len(DEPTHS)
    made = Verify(platform, starts)
    run_op(platform, way, made.begin, made.out.values())
    seen = {name: on_host(tensor) for name, tensor in made.out.items()}
    assert seen["seq_lens"].tolist() == [start + rows if start >= 0 else 0 for start in starts]
    for r, start in enumerate(starts):
        own = slice(r * rows, (r + 1) * rows)
        if start < 0:
            assert seen["slot_mapping"][own].tolist() == [-1] * rows
            continue
        assert seen["token_ids"][own].tolist() == [8, *TOKENS]
        assert seen["positions"][own].tolist() == [min(start + depth, 33) for depth in DEPTHS]
        assert seen["slot_mapping"][own].tolist() == [slot_of(start + i, BLOCKS[r], 48, BLOCK) for i in range(rows)]
        bits = seen["ancestors"][own].tolist()
        for row, word in enumerate(bits):
            sees = {i for i in range(64) if word >> i & 1}
            assert sees == line(row), (
                f"row {row} of request {r} sees rows {sorted(sees)}, its line is {sorted(line(row))}"
            )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@case(
    "kernels.verify-tree",
    "The path that the target's tokens follow is accepted, and its keys and values move to consecutive slots.",
    hazard="path-kv-not-moved",
    cause="verify_tree or move_kv: the wrong child, a path that goes on after a miss, or keys left behind",
)
def test_verify_tree(platform: Platform, way: str, sampled: bool, seed: int) -> None:
    rows, starts = len(DEPTHS), [14, -1, 20]
    made = Verify(platform, starts)
    made.begin()
    # Request 0 follows rows 0, 2, 5 and misses; request 2 follows rows 0, 1, 3, 6, 7 to the end.
    paths = {0: [0, 2, 5], 2: [0, 1, 3, 6, 7]}
    logits = torch.randn(3, rows, 12, generator=torch.Generator().manual_seed(seed))
    for r, path in paths.items():
        for row, child in zip(path, [*path[1:], 0], strict=True):
            logits[r, row, TOKENS[child - 1] if child else 11] = 90.0  # far above what noise can change
    there = logits.flatten(0, 1).to(platform.device)
    warm = torch.tensor([0.7, 1.0, 0.0], device=platform.device) if sampled else None
    seeds = torch.tensor([5, 6, 7], device=platform.device) if sampled else None
    cache = [torch.arange(160.0).view(10, BLOCK, 1, 1) * sign for sign in (1, -1)]
    moved = [part.clone().to(platform.device) for part in cache]

    def body() -> None:
        ops.verify_tree(
            there,
            made.tokens,
            made.parents,
            warm,
            seeds,
            made.starts,
            made.out["positions"],
            made.out["slot_mapping"],
            **made.written,
        )
        ops.move_kv(moved[0], moved[1], made.written["from_slots"], made.written["to_slots"])

    run_op(platform, way, body, [*made.written.values(), *moved])
    seen = {name: on_host(tensor) for name, tensor in made.written.items()}
    assert seen["num_sampled"].tolist() == [3, 0, 5]
    assert seen["sampled_token_ids"].tolist() == [[6, 3, 11, -1, -1], [-1] * 5, [4, 1, 5, 7, 11]]
    for r, path in paths.items():
        places = path + [path[-1]] * (5 - len(path))
        assert seen["path_rows"][r * 5 : r * 5 + 5].tolist() == [r * rows + row for row in places]
    wanted = [part.clone() for part in cache]
    for r, path in paths.items():
        for place, row in enumerate(path):
            source, target = (slot_of(starts[r] + i, BLOCKS[r], 48, BLOCK) for i in (row, place))
            for part, old in zip(wanted, cache, strict=True):
                part.view(-1)[target] = old.view(-1)[source]
    for name, part, now in zip(("keys", "values"), wanted, moved, strict=True):
        expect_equal(on_host(now), part, name)


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.verify-tree-synthetic",
    "A tree is accepted to the depth that its chances say, whatever the target says.",
    hazard="synthetic-acceptance",
    cause="verify_tree_synthetic: the chance of another place, or a live request left out",
    quick=True,
)
def test_verify_tree_synthetic(platform: Platform, way: str, seed: int) -> None:
    made = Verify(platform, [14, -1, 20])
    made.begin()
    logits = torch.randn(3 * len(DEPTHS), 12, generator=torch.Generator().manual_seed(seed)).to(platform.device)
    chances, seeds = (torch.tensor(each, device=platform.device) for each in ([1.0, 1.0, 0.0, 1.0], [1, 2, 3]))
    inputs = logits, made.tokens, chances, seeds, made.starts, made.out["slot_mapping"]
    run_op(platform, way, lambda: ops.verify_tree_synthetic(*inputs, **made.written), made.written.values())
    assert on_host(made.written["num_sampled"]).tolist() == [3, 0, 3]
