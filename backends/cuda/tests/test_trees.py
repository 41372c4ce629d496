"""The ops of draft trees: what the Triton kernels write is what the plain torch reference writes.

With TRITON_INTERPRET=1 the tests also run without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, INTERPRETED, device, expect, expect_same, ops
from specgraph_run.decoder import ops as decoder_ops
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specgraph import ops as kernels
from specgraph.ops import DeviceLengths, KVCache, Mask

__all__ = ["device"]  # the fixture
BLOCK = 16


def full(*shape: int) -> Tensor:
    return torch.full(shape, -7)


def random_tables(requests: int, blocks: int, g: torch.Generator) -> Tensor:
    return (torch.randperm(requests * blocks, generator=g) + 1).view(requests, blocks).int()


def random_tree(requests: int, nodes: int, steps: int, g: torch.Generator) -> Tensor:
    """Parents [R, nodes] in which no node is deeper than `steps`."""
    parents = torch.zeros(requests, nodes, dtype=torch.int64)
    for r in range(requests):
        depth = [0]
        for i in range(nodes):
            shallow = [row for row in range(i + 1) if depth[row] < steps]
            parents[r, i] = shallow[int(torch.randint(len(shallow), (1,), generator=g))]
            depth.append(depth[int(parents[r, i])] + 1)
    return parents


@pytest.mark.parametrize(("requests", "k", "steps", "vocab"), [(1, 4, 5, 9000), (3, 3, 3, 500), (2, 8, 2, 4097)])
@pytest.mark.parametrize("mapped", [False, True])
def test_growing_and_choosing(requests: int, k: int, steps: int, vocab: int, mapped: bool) -> None:
    g = torch.Generator().manual_seed(k)
    offsets = torch.arange(vocab) if mapped else None
    count = k + (steps - 1) * k * k
    candidates = kernels.Candidates(torch.zeros(requests, count), *(full(requests, count) for _ in range(2)))
    beams = kernels.Beams(torch.zeros(requests, k), full(requests, k), *(full(requests * k) for _ in range(3)))
    for step in range(steps):
        logits = torch.randn(requests * (1 if step == 0 else k), vocab, generator=g) * 4
        logits[-1, [17, 5, 300, 301]] = 30.0  # equals, in two blocks where there are two
        given = logits, offsets, torch.tensor([step]), step == 0
        *_, candidates, beams = expect_same("grow_tree", *given, candidates, beams)
    nodes = min(count, 15)
    expect_same("choose_nodes", candidates, kernels.TreeNodes(full(requests, nodes), full(requests, nodes)))


@pytest.mark.parametrize(
    ("steps", "top_k", "nodes"), [(5, 4, 15), (1, 3, 3), (4, 1, 4), (7, 4, 15), (3, 8, 63), (9, 2, 31)]
)
@pytest.mark.parametrize("own_vocabulary", [False, True])
def test_a_tree_of_one_pass(steps: int, top_k: int, nodes: int, own_vocabulary: bool) -> None:
    g, requests, vocab = torch.Generator().manual_seed(nodes + own_vocabulary), 3, 5000
    logits = torch.randn(requests * steps, vocab, generator=g) * 4
    logits[-steps:, [17, 5, 4300, 301]] = 30.0  # equals, in two blocks of columns
    logits[0, :] = 0.0
    offsets = torch.randint(0, 9, (vocab,), generator=g) if own_vocabulary else None
    expect_same(
        "draft_block_tree", logits, offsets, top_k, kernels.TreeNodes(full(requests, nodes), full(requests, nodes))
    )


@pytest.mark.parametrize("step", [0, 2])
def test_advancing(step: int) -> None:
    g, requests, k = torch.Generator().manual_seed(step), 5, 3
    lens = torch.tensor([7, 0, 30, 63, 44], dtype=torch.int32)
    arguments = (lens, lens.long() + 2, random_tables(requests, 4, g))
    written = {"seq_lens": torch.full((requests,), -7, dtype=torch.int32), "draft_step": torch.tensor([step])}
    written |= {name: torch.full((requests * k,), -7) for name in ("positions", "slot_mapping")}
    expect("advance_tree", *arguments, tree_len=9, max_model_len=64, block_size=BLOCK, written=written)


@pytest.mark.parametrize("way", ["greedy", "sampled", "synthetic"])
@pytest.mark.parametrize(("nodes", "steps"), [(15, 5), (8, 3), (1, 1)])
def test_accepting_a_path(way: str, nodes: int, steps: int) -> None:
    g, requests, vocab = torch.Generator().manual_seed(nodes), 6, 6
    parents = random_tree(requests, nodes, steps, g)
    logits = torch.randn(requests * (nodes + 1), vocab, generator=g) * 3
    drafts = torch.randint(-1, vocab, (requests, nodes), generator=g)
    drafts[::2, 0] = logits[:: nodes + 1].argmax(dim=1)[::2]
    starts = torch.tensor([3, -1, 60, 100, 7, 9])
    slots = torch.randperm(900, generator=g)[: requests * (nodes + 1)]
    slots[::7] = -1
    positions, seeds = torch.arange(requests * (nodes + 1)) + 5, torch.arange(requests) * 977
    acceptance = {
        "greedy": decoder_ops.Acceptance(),
        "sampled": decoder_ops.Acceptance(torch.tensor([0.0, 1.0, 0.7, 0.0, 1.3, 0.2]), seeds),
        "synthetic": decoder_ops.Acceptance(seeds=seeds, chances=torch.full((steps,), 0.6)),
    }[way]
    sampled = decoder_ops.Sampled(full(requests, steps + 1), full(requests).int())
    path = decoder_ops.AcceptedPath(full(requests * (steps + 1)), *(full(requests * steps) for _ in range(2)))
    given = logits, kernels.TreeNodes(drafts, parents), starts, positions, slots, acceptance
    *_, found, _ = expect_same("verify_tree", *given, sampled, path)
    assert way == "synthetic" or nodes == 1 or int(found.num_sampled.max()) > 1, (
        "no node was accepted: the test compared nothing"
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("moves", [1, 5, 300])
def test_moving_keys_and_values(packed: bool, moves: int) -> None:
    g = torch.Generator().manual_seed(moves)
    cache = torch.randn(40, BLOCK, 2, 2 * 48, generator=g).to(DEVICE)
    if packed:
        key, value = cache.transpose(1, 2).contiguous().transpose(1, 2).split(48, dim=3)
    else:
        key, value = (part.contiguous() for part in cache.split(48, dim=3))
    order = torch.randperm(40 * BLOCK - 1, generator=g)[: moves + 1] + 1
    source, target = order[1:].clone(), order[:-1].clone()  # the place of one is the goal of the next
    source[::3] = target[::3] = 0
    wanted = key.clone(), value.clone()
    decoder_ops.move_kv.reference(*wanted, source.to(DEVICE), target.to(DEVICE))
    ops().move_kv(key, value, source.to(DEVICE), target.to(DEVICE))
    assert torch.equal(key, wanted[0])
    assert torch.equal(value, wanted[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "dim"), [(16, 8, 64), (4, 2, 48)])
def test_attention_of_a_tree(rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no bfloat16 arithmetic")
    g, requests, kv_heads = torch.Generator().manual_seed(rows), 3, 2
    parents = random_tree(requests, rows - 1, 5, g)
    bits = torch.ones(requests, rows, dtype=torch.int64)
    for row in range(1, rows):
        bits[:, row] = bits.gather(1, parents[:, row - 1 : row])[:, 0] | (1 << row)
    lengths = torch.tensor([rows + 37, 0, rows], dtype=torch.int32)
    query = torch.randn(requests * rows, heads, dim, generator=g).to(dtype)
    table = random_tables(requests, 6, g)
    cache = [torch.randn(20, BLOCK, kv_heads, dim, generator=g).to(dtype) for _ in range(2)]
    for part in cache:
        part.flatten(0, 1)[int(table[0, (rows + 37) // BLOCK]) * BLOCK + (rows + 37) % BLOCK] = float("nan")
    starts, mask = torch.arange(0, len(query) + 1, rows).int(), Mask(False, ancestors=bits.flatten(), tree_len=rows)
    given = query, KVCache(*cache), table, DeviceLengths(lengths, starts, rows), mask
    seen = ops().paged_attention(*tree_map_only(Tensor, lambda t: t.to(DEVICE), given), scale=0.2).cpu()
    wide = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, given)
    wanted = kernels.paged_attention.reference(*wide, scale=0.2)
    near = 2e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(seen.double(), wanted, rtol=near, atol=near)
