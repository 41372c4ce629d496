"""Draft trees of up to 64 rows that differ from request to request, against plain Python loops and float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.cases.test_kernels_noise import RESAMPLE, TEMPERATURE, drawn
from specgraph_conformance.rig import WAYS, expect_close, on_host, run_op, slot_of

STARTS = [21, 3, -1, 40]
"""Position of each request's last token; the third request is inert."""
BLOCK, BLOCKS, VOCAB, DEPTH = 16, 8, 7, 6


@dataclass(frozen=True)
class Trees:
    """A random tree of each request, the same on every run of a seed."""

    rows: int
    tokens: list[list[int]]
    parents: list[list[int]]
    blocks: list[list[int]]

    @classmethod
    def drawn(cls, rows: int, seed: int) -> Trees:
        """Trees of `rows` rows and at most DEPTH levels; children of one node have different tokens."""
        rng = random.Random(seed)
        every_tokens: list[list[int]] = []
        every_parents: list[list[int]] = []
        for _ in STARTS:
            depth, tokens, parents = [0], list[int](), list[int]()
            taken: dict[int, set[int]] = {}
            while len(tokens) < rows - 1:
                # Parents come first; the deepest open rows are preferred, so that some paths are long.
                parent = rng.choice(range(max(0, len(tokens) - 4), len(tokens) + 1))
                free = set(range(VOCAB)) - taken.setdefault(parent, set())
                if depth[parent] == DEPTH or not free:
                    parent = rng.choice([row for row in range(len(tokens) + 1) if depth[row] < DEPTH])
                    free = set(range(VOCAB)) - taken.setdefault(parent, set())
                    if not free:
                        continue
                tokens.append(rng.choice(sorted(free)))
                taken[parent].add(tokens[-1])
                parents.append(parent)
                depth.append(depth[parent] + 1)
            every_tokens.append(tokens)
            every_parents.append(parents)
        order = rng.sample(range(1, 1 + len(STARTS) * BLOCKS), len(STARTS) * BLOCKS)
        blocks = [order[r * BLOCKS : (r + 1) * BLOCKS] for r in range(len(STARTS))]
        return cls(rows, every_tokens, every_parents, blocks)

    def line(self, request: int, row: int) -> list[int]:
        """The rows of the path to a row, from row 0 on."""
        return [0] if row == 0 else [*self.line(request, self.parents[request][row - 1]), row]

    def below(self, request: int, row: int) -> list[int]:
        """The rows whose path goes through a row, itself included."""
        return [i for i in range(self.rows) if row in self.line(request, i)]

    def begin(self, platform: Platform) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Arguments of `begin_tree_verify`, and what it writes, on the device."""
        device, n = platform.device, len(STARTS) * self.rows
        given = {
            "last_token_ids": torch.full((len(STARTS),), 6),
            "draft_token_ids": torch.tensor(self.tokens),
            "draft_parents": torch.tensor(self.parents),
            "start_positions": torch.tensor(STARTS),
            "block_table": torch.tensor(self.blocks, dtype=torch.int32),
        }
        written = {
            name: torch.full((n,), -77, device=device)
            for name in ("token_ids", "positions", "slot_mapping", "ancestors")
        }
        written["seq_lens"] = torch.full((len(STARTS),), -77, dtype=torch.int32, device=device)
        return {name: tensor.to(device) for name, tensor in given.items()}, written


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [33, 64])
@case(
    "kernels.trees-of-many-rows",
    "In a batch of different trees of up to 64 rows each row has the position and the bits of its own path, and those "
    "drawn so far attend to it as in float64, whatever lies in the slots of nodes to come.",
    hazard="trees-of-one-shape",
    cause="masks of 32 bits or a sign bit, another request's parents, or NaN in slots that no row sees",
)
def test_rows(platform: Platform, way: str, rows: int, seed: int) -> None:
    trees, limit, heads, dim = Trees.drawn(rows, seed), 1000, 2, 32
    given, written = trees.begin(platform)
    g = torch.Generator().manual_seed(seed)
    half = rows // 2
    query = torch.randn(len(STARTS) * half, heads, dim, generator=g)
    caches = [torch.randn(1 + len(STARTS) * BLOCKS, BLOCK, 1, dim, generator=g) for _ in range(2)]
    for r, start in enumerate(STARTS):  # slots of nodes that are not drawn yet: no row of the first half sees them
        for row in range(half, rows):
            slot = slot_of(max(start, 0) + row, trees.blocks[r], limit, BLOCK)
            for cache in caches:
                cache.view(-1, dim)[slot] = float("nan")
    there = [tensor.to(platform.device) for tensor in (query, *caches)]
    out = torch.zeros_like(there[0])

    def work() -> None:
        ops.begin_tree_verify(**given, num_steps=DEPTH, max_model_len=limit, block_size=BLOCK, **written)
        words = written["ancestors"].view(len(STARTS), rows)[:, :half].flatten()
        starts = torch.arange(0, len(words) + 1, half, dtype=torch.int32, device=words.device)
        lengths = ops.DeviceLengths(written["seq_lens"], starts, half)
        mask = ops.Mask(causal=False, ancestors=words, tree_len=rows)
        cache = ops.KVCache(there[1], there[2])
        out.copy_(ops.paged_attention(there[0], cache, given["block_table"], lengths, mask, scale=0.3))

    run_op(platform, way, work, [*written.values(), out])
    now = {name: on_host(tensor) for name, tensor in written.items()}
    attended = on_host(out).view(len(STARTS), half, heads, dim)
    for r, start in enumerate(STARTS):
        if start < 0:
            assert not attended[r].any(), "an inert request has output"
            continue
        keys, values = (cache[trees.blocks[r]].flatten(0, 1)[:, 0].double() for cache in caches)
        for row in range(rows):
            line, where = trees.line(r, row), f"row {row} of request {r}"
            assert now["positions"][r * rows + row] == start + len(line) - 1, f"position of {where}"
            word = int(now["ancestors"][r * rows + row])
            sees = [i for i in range(64) if word >> i & 1]
            assert sees == line, f"{where} sees rows {sees}, its path is {line}"
            if row >= half:
                continue
            own = [*range(start), *(start + i for i in line)]
            scores = query[r * half + row].double() @ keys[own].T * 0.3
            expect_close(attended[r, row], scores.softmax(-1) @ values[own], 1e-3, where)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [12, 64])
@case(
    "kernels.paths-of-many-trees",
    "In a batch of different trees, greedy and sampled, each request accepts the path of its own tree that the "
    "target's tokens follow, drawn with the noise of their positions; slots that are not on a path stay.",
    hazard="trees-of-one-shape",
    cause="verify_tree: another request's parents, noise of the row instead of the position, or moves behind the path",
)
def test_paths(platform: Platform, way: str, rows: int, seed: int) -> None:
    trees, requests = Trees.drawn(rows, seed), len(STARTS)
    given, begun = trees.begin(platform)
    ops.begin_tree_verify(**given, num_steps=DEPTH, max_model_len=1000, block_size=BLOCK, **begun)
    seeds = [1 << 40, -5, 3, 77]
    warm = torch.tensor([TEMPERATURE, 0.0, 1.0, TEMPERATURE])
    logits = torch.randn(requests, rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    wanted: list[list[int]] = []
    for r, start in enumerate(STARTS):
        row, path = 0, [0]
        while True:
            options = [i + 1 for i, parent in enumerate(trees.parents[r]) if parent == row]
            if options and len(path) < 4 + r:  # the target agrees with the child of the longest path
                longest = max(options, key=lambda child: max(len(trees.line(r, i)) for i in trees.below(r, child)))
                logits[r, row, trees.tokens[r][longest - 1]] += 9.0
            if warm[r] > 0:
                chosen, lead = drawn(logits[r, row], seeds[r], start + len(path), RESAMPLE)
            else:
                chosen, lead = int(logits[r, row].argmax()), 1.0
            assert lead > 1e-3, "the case's own logits are too close to call: change its seed"
            match = [child for child in options if trees.tokens[r][child - 1] == chosen]
            if not match or start < 0:
                break
            row = match[0]
            path.append(row)
        wanted.append([*path, chosen])
    device = platform.device
    there, temperature, numbers = (t.to(device) for t in (logits.flatten(0, 1), warm, torch.tensor(seeds)))
    written = {"sampled_token_ids": torch.full((requests, DEPTH + 1), -77, device=device)}
    written |= {"num_sampled": torch.full((requests,), -77, dtype=torch.int32, device=device)}
    sizes = {"path_rows": DEPTH + 1, "from_slots": DEPTH, "to_slots": DEPTH}
    written |= {name: torch.full((requests * n,), -77, device=device) for name, n in sizes.items()}
    run_op(
        platform,
        way,
        lambda: ops.verify_tree(
            there, given["draft_token_ids"], given["draft_parents"], temperature, numbers,
            given["start_positions"], begun["positions"], begun["slot_mapping"], **written,
        ),
        written.values(),
    )  # fmt: skip
    seen = {name: on_host(tensor).view(requests, -1).tolist() for name, tensor in written.items()}
    for r, start in enumerate(STARTS):
        *path, last = wanted[r]
        if start < 0:
            assert seen["num_sampled"][r] == [0]
            assert seen["sampled_token_ids"][r] == [-1] * (DEPTH + 1)
            assert seen["from_slots"][r] == seen["to_slots"][r]
            continue
        tokens = [*(trees.tokens[r][row - 1] for row in path[1:]), last]
        assert seen["num_sampled"][r] == [len(path)], f"request {r} accepts the path {path}"
        assert seen["sampled_token_ids"][r] == tokens + [-1] * (DEPTH + 1 - len(tokens)), f"tokens of request {r}"
        rest = [path[-1]] * (DEPTH + 1 - len(path))
        assert seen["path_rows"][r] == [r * rows + row for row in (*path, *rest)], f"path of request {r}"
        slots = [slot_of(start + row, trees.blocks[r], 1000, BLOCK) for row in range(rows)]
        moves = {slots[i]: slots[row] for i, row in enumerate(path) if i != row}
        made = dict(zip(seen["to_slots"][r], seen["from_slots"][r], strict=True))
        assert {to: source for to, source in made.items() if to != source} == moves, f"moves of request {r}"
    assert max(map(len, wanted)) > 4, "no path has three drafts"


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.every-stop-token",
    "A request stops at any of its 16 stop tokens, wherever in the round it was sampled, and a launch goes on while "
    "any request does.",
    hazard="some-stop-tokens",
    cause="stop_finished or publish_round: some of the stop tokens, some of the places, or the first request only",
)
def test_stops(platform: Platform, way: str, seed: int) -> None:
    device, query_len, width = platform.device, 4, 16
    requests = query_len * width + 2
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 90, (requests, query_len), generator=generator)
    stops = torch.arange(requests * width).view(requests, width) + 100
    counts = torch.full((requests,), query_len, dtype=torch.int32)
    for r in range(query_len * width):  # request r has its stop token of column r // query_len in place r % query_len
        tokens[r, r % query_len] = stops[r, r // query_len]
    counts[-1] = 0
    left = torch.full((requests,), 50)
    ring, progress = torch.zeros(2, 12, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.int64).to(device)
    inputs = [tensor.to(device) for tensor in (tokens, counts, left, stops)]
    agains = [torch.full((1,), -7, dtype=torch.int32, device=device) for _ in range(2)]
    results = torch.zeros(10, dtype=torch.int64, device=device)

    def work() -> None:
        for again, part in zip(agains, (slice(0, requests), slice(0, requests - 2)), strict=True):
            given = [each[part] for each in inputs]
            ops.publish_round(results, *given, ring=ring, progress=progress, again=again, rounds_per_launch=9)
        ops.stop_finished(*inputs)

    run_op(platform, way, work, [ring, progress, *agains, *inputs[1:3]])
    wanted = [0] * (requests - 2) + [query_len, 0]
    seen = on_host(inputs[1]).tolist()
    missed = [r for r in range(requests) if seen[r] != wanted[r]]
    assert not missed, f"request {missed[0]} has count {seen[missed[0]]}: it must be {wanted[missed[0]]}"
    assert [int(on_host(again)) for again in agains] == [1, 0], "only the last but one request goes on"
