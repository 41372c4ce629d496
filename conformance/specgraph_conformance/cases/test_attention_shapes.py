"""Attention beside the usual shapes: other scales, many heads, large caches, NaN behind a request."""

from __future__ import annotations

import pytest
import torch
from specgraph.device import Platform

from specgraph_conformance.attention_rows import attention_of, check_attention, rows_for
from specgraph_conformance.case import case
from specgraph_conformance.op_run import run_on


@pytest.mark.parametrize("factor", [0.02, 0.3])
@case(
    "attention.scale-of-the-layer",
    "Scores are multiplied by the layer's own scale, whatever the head size is.",
    hazard="attention-own-scale",
    cause="a scale of head_dim ** -0.5 in the kernel, or one that is applied twice",
)
def test_scale(platform: Platform, attention: str, factor: float, seed: int) -> None:
    check_attention(platform, attention, seed, [4] * 3, [4, 37, 90], scale=factor)


@pytest.mark.parametrize("heads", [(40, 8), (64, 4), (6, 2), (14, 2), (9, 3), (20, 4)], ids=lambda h: f"{h[0]}x{h[1]}")
@case(
    "attention.many-heads",
    "With 40 and with 64 query heads, and with 3, 5 and 7 per key head, each head has float64's output, in decode and "
    "verify passes.",
    hazard="attention-many-blocks",
    cause="query heads past a fixed number, or groups that are no power of two, matched to the key heads wrongly",
)
def test_heads(platform: Platform, attention: str, heads: tuple[int, int], seed: int) -> None:
    for rows in (1, 4):
        check_attention(platform, attention, seed, [rows] * 3, [rows, 37, 70], heads)


@case(
    "attention.tail-of-the-last-block",
    "NaN behind a request's last key, in its own last block, changes nothing.",
    hazard="nan-behind-the-last-key",
    cause="values past the length that are multiplied by a weight of zero: 0 * NaN is NaN",
    quick=True,
)
def test_tail(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [2, 4, 4, 1], [2, 33, 60, 32], poison=True, poison_tail=True)


@case(
    "attention.many-blocks",
    "A request whose blocks lie 1,500 blocks apart in a large cache attends to its own keys.",
    hazard="attention-many-blocks",
    cause="block numbers of too few bits",
)
def test_blocks(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [2, 2], [40, 21], (4, 1), spare_blocks=1500)


@pytest.mark.parametrize(("rows", "requests"), [(1, 4), (5, 4), (16, 4), (5, 40)])
@case(
    "attention.long-contexts-in-half",
    "In bfloat16, with four query heads per key head and up to 5,000 keys, each request of a small or a large batch "
    "attends to all of its keys and to no others.",
    hazard="attention-many-keys",
    cause="splits of the keys that are left out or added twice, or lengths of other requests where there are many",
)
def test_long_half(platform: Platform, attention: str, rows: int, requests: int, seed: int) -> None:
    lengths = [5000, rows + 3, 0, 700] if requests == 4 else [0 if r % 9 == 4 else 20 + 67 * r for r in range(requests)]
    made = rows_for(
        platform, attention, seed, [rows] * requests, lengths, (8, 2), dim=128, block=128, dtype=torch.bfloat16
    )
    for blocks in made.blocks:
        made.spread_values(blocks)
    made.check(run_on(platform), attention_of(platform, attention, made))


@pytest.mark.parametrize("rows", [1, 3])
@case(
    "attention.own-keys-of-long-contexts",
    "With contexts of a multiple of 64 and one to three more, up to 4,099 keys, each row sees the last of its keys.",
    hazard="attention-many-keys",
    cause="a last split, or a last part of one, that is left out where it has few keys",
)
def test_own_keys(platform: Platform, attention: str, rows: int, seed: int) -> None:
    lengths = [64 * n + extra for n in (1, 2, 4, 8, 16, 32, 64) for extra in (1, 3)]
    made = rows_for(platform, attention, seed, [rows] * len(lengths), lengths)
    # The values of a pass's rows are so large that a missing one of them shows among thousands of others.
    made.new.value.mul_(torch.tensor(lengths).repeat_interleave(rows)[:, None, None])
    # Its share of the output is about 1. Shares cancel, so an output may be far less than what half precision rounds.
    tolerance = None if made.dtype == torch.float32 else 0.1
    made.check(run_on(platform), attention_of(platform, attention, made), tolerance)
