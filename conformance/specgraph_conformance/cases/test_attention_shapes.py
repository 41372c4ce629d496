"""Attention beside the usual shapes: other scales, many heads, large caches, NaN behind a request, one rounding."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance import oracles
from specgraph_conformance.attention_rows import Rows
from specgraph_conformance.case import case
from specgraph_conformance.cases.test_kernels_models import windowed_forward
from specgraph_conformance.rig import WAYS, expect_close, on_host, run_op


@pytest.mark.parametrize("factor", [0.02, 0.3])
@case(
    "attention.scale-of-the-layer",
    "Scores are multiplied by the layer's own scale, whatever the head size is.",
    hazard="attention-own-scale",
    cause="a scale of head_dim ** -0.5 in the kernel, or one that is applied twice",
)
def test_scale(platform: Platform, attention: str, factor: float, seed: int) -> None:
    Rows(platform, attention, [4] * 3, [4, 37, 90], scale=factor, seed=seed).check()


@pytest.mark.parametrize("heads", [(40, 8), (64, 4)], ids=lambda h: f"{h[0]}x{h[1]}")
@case(
    "attention.many-heads",
    "With 40 and with 64 query heads each head has float64's output.",
    hazard="attention-many-blocks",
    cause="query heads past a fixed number, or groups that are no power of two",
)
def test_heads(platform: Platform, attention: str, heads: tuple[int, int], seed: int) -> None:
    Rows(platform, attention, [2] * 3, [2, 37, 20], heads, seed=seed).check()


@case(
    "attention.tail-of-the-last-block",
    "NaN behind a request's last key, in its own last block, changes nothing.",
    hazard="nan-behind-the-last-key",
    cause="values past the length that are multiplied by a weight of zero: 0 * NaN is NaN",
    quick=True,
)
def test_tail(platform: Platform, attention: str, seed: int) -> None:
    Rows(platform, attention, [1, 4, 4, 2], [18, 33, 60, 2], poison=True, poison_tail=True, seed=seed).check()


@case(
    "attention.many-blocks",
    "A request whose blocks lie 1,500 blocks apart in a large cache attends to its own keys.",
    hazard="attention-many-blocks",
    cause="block numbers of too few bits",
)
def test_blocks(platform: Platform, attention: str, seed: int) -> None:
    Rows(platform, attention, [2, 2], [40, 21], (4, 1), spare_blocks=1500, seed=seed).check()


@pytest.mark.parametrize("op", ["windowed_attention", "windowed_attention_host"])
@pytest.mark.parametrize("window", [0, 5, 33])
@case(
    "kernels.windows-of-ragged-rows",
    "Windows and sinks with the layer's own scale, in a batch of ragged rows with inert requests between live ones, "
    "give float64's output.",
    hazard="attention-own-scale",
    cause="windowed_attention: the same number of rows for all requests, or a scale of head_dim ** -0.5",
)
def test_windows(platform: Platform, op: str, window: int, seed: int) -> None:
    sinks = torch.randn(8, generator=torch.Generator().manual_seed(seed)) * 2
    rows = Rows(
        platform, "paged", [19, 1, 3, 6, 2], [19, 40, 0, 70, 33], (8, 2), seed=seed, window=window or None,
        sinks=sinks, scale=0.3, poison=True, poison_tail=True,
    )  # fmt: skip
    rows.check(partial(windowed_forward, op))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@case(
    "kernels.rotation-in-float32",
    "Rotation rounds once: queries and keys are the nearest values of their dtype to float64's.",
    hazard="part-of-the-head-rotated",
    cause="rotate_and_store: cosines and sines, or products, in the narrow type",
)
def test_rotation(platform: Platform, way: str, dtype: torch.dtype, seed: int) -> None:
    rows, heads, dim = 9, 2, 64
    g = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(rows, heads, dim, generator=g).to(dtype) for _ in range(3))
    angles = torch.randn(50, dim // 2, generator=g) * 3
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions, slots = torch.arange(0, 45, 5), torch.arange(16, 16 + rows)
    caches = [torch.zeros(3, 16, heads, dim, dtype=dtype) for _ in range(2)]
    tensors = (query, key, value, table, positions, slots, *caches)
    q, k, v, rotary, at, to, keys, values = (t.to(platform.device) for t in tensors)
    out = torch.zeros_like(q)
    run_op(
        platform, way, lambda: out.copy_(ops.rotate_and_store(q, k, v, rotary, at, to, keys, values)),
        [out, keys, values],
    )  # fmt: skip
    cos, sin = (part.double()[positions][:, None] for part in table.chunk(2, dim=-1))

    def turned(x: Tensor) -> Tensor:
        left, right = x.double().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    half_step = torch.finfo(dtype).eps / 2
    seen = on_host(keys).flatten(0, 1)[16 : 16 + rows]
    for name, got, wanted in (("queries", on_host(out), turned(query)), ("keys", seen, turned(key))):
        # 1e-5: a float32 result next to the middle of two values may be rounded either way.
        excess = (got.double() - wanted).abs() - wanted.abs() * half_step * 1.01 - 1e-5
        expect_close(excess.clamp(min=0), torch.zeros_like(excess), 0.0, f"rounding of {name}")


@pytest.mark.parametrize("requests", [4, 40])
@pytest.mark.parametrize("rows", [1, 5, 16])
@case(
    "attention.long-contexts-in-half",
    "In bfloat16, with four query heads per key head and up to 5,000 keys, each request of a small or a large batch "
    "attends to all of its keys and to no others.",
    hazard="attention-many-keys",
    cause="splits of the keys that are left out or added twice, or lengths of other requests where there are many",
)
def test_long_half(platform: Platform, attention: str, rows: int, requests: int, seed: int) -> None:
    lengths = [5000, rows + 3, 0, 700] if requests == 4 else [0 if r % 9 == 4 else 20 + 67 * r for r in range(requests)]
    made = Rows(
        platform, attention, [rows] * requests, lengths, (8, 2), dim=128, block=128, dtype=torch.bfloat16, seed=seed
    )
    # Random values average out over thousands of keys: those of a block are so large that it shows where it is missing
    # or counted twice, and those of two blocks add up to little.
    for blocks in made.blocks:
        for place, block in enumerate(blocks):
            for cache in (made.value_cache, made.cache.value):
                cache[block] += (len(blocks) if place % 2 else -len(blocks)) / 4
    made.check()


@pytest.mark.parametrize("rows", [1, 3])
@case(
    "attention.own-keys-of-long-contexts",
    "With contexts of a multiple of 64 and one to three more, up to 4,099 keys, each row sees the last of its keys.",
    hazard="attention-many-keys",
    cause="a last split, or a last part of one, that is left out where it has few keys",
)
def test_own_keys(platform: Platform, attention: str, rows: int, seed: int) -> None:
    lengths = [64 * n + extra for n in (1, 2, 4, 8, 16, 32, 64) for extra in (1, 3)]
    made = Rows(platform, attention, [rows] * len(lengths), lengths, (4, 2), seed=seed)
    # The values of a pass's rows are so large that a missing one of them shows among thousands of others.
    for value in (made.value, made.device_rows[2]):
        for number, length in enumerate(lengths):
            value[number * rows : (number + 1) * rows] *= length
    made.check()


@pytest.mark.parametrize("heads", [(6, 2), (14, 2), (9, 3), (20, 4)], ids=lambda h: f"{h[0]}x{h[1]}")
@case(
    "attention.groups-of-any-size",
    "With 3, 5 and 7 query heads per key head each head has float64's output, in decode and verify passes.",
    hazard="attention-many-blocks",
    cause="groups of query heads that are no power of two, matched to the key heads the wrong way round",
)
def test_groups(platform: Platform, attention: str, heads: tuple[int, int], seed: int) -> None:
    for rows in (1, 4):
        Rows(platform, attention, [rows] * 3, [rows, 37, 70], heads, seed=seed).check()


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.rotation-of-late-positions",
    "Positions up to 40,000 are rotated by their own angles.",
    hazard="part-of-the-head-rotated",
    cause="rotate_and_store: a table of fewer rows, whose last one is taken for all positions past it",
)
def test_late(platform: Platform, way: str, seed: int) -> None:
    heads, dim, positions = 2, 64, torch.tensor([0, 2047, 2048, 4095, 4096, 8192, 16_385, 32_767, 32_768, 39_999])
    g, rows = torch.Generator().manual_seed(seed), len(positions)
    query, key, value = (torch.randn(rows, heads, dim, generator=g) for _ in range(3))
    angles = torch.rand(40_000, dim // 2, generator=g) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    tensors = (query, key, value, table, positions, torch.arange(16, 16 + rows))
    q, k, v, rotary, at, to = (t.to(platform.device) for t in tensors)
    keys, values = (torch.zeros(3, 16, heads, dim, device=platform.device) for _ in range(2))
    out = torch.zeros_like(q)
    run_op(
        platform, way, lambda: out.copy_(ops.rotate_and_store(q, k, v, rotary, at, to, keys, values)),
        [out, keys, values],
    )  # fmt: skip
    stored = on_host(keys).flatten(0, 1)[16 : 16 + rows]
    for name, seen, x in (("queries", on_host(out), query), ("keys", stored, key)):
        expect_close(seen, oracles.rotate(x.double(), table, positions), 1e-5, f"{name} at {positions.tolist()}")
