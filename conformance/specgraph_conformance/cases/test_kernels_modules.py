"""Ops of drafters with several modules, which compute the last positions again: against plain Python loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specgraph import ops
from specgraph.attention import NULL_BLOCK, NULL_SLOT
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, expect_equal, on_host, run_op, slot_of

BLOCK, LIMIT, WIDTH = 4, 40, 24
PAST = {"one": 1, "three": 3, "more-than-a-block": 6}
"""Past rows per request: K - 1."""
TABLE = [
    [5, 2, 0, 0, 0, 0, 0, 0, 0, 0],
    [1, 12, 13, 0, 0, 0, 0, 0, 0, 0],
    [3, 4, 6, 14, 15, 16, 17, 18, 19, 20],
    [8, 7, 9, 0, 0, 0, 0, 0, 0, 0],
    [10, 11, 0, 0, 0, 0, 0, 0, 0, 0],
]
"""The last request shares no block; request 0 has none for its second round's end."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("past", PAST)
@case(
    "kernels.begin-modules",
    "The rows before a round take what was kept of them, without a gap up to the round; tokens, hidden states, slots "
    "and lengths are those of a host loop.",
    hazard="module-past-rows",
    cause="begin_modules: an entry of another position, a gap, a row before position 0, or a rejected row with a slot",
    quick=True,
)
def test_begin(platform: Platform, way: str, past: str, seed: int) -> None:
    _begin(platform, way, PAST[past], WIDTH, seed)


def _begin(platform: Platform, way: str, w: int, width: int, seed: int) -> None:
    device, q = platform.device, 3
    generator = torch.Generator().manual_seed(seed)
    counts, starts = [3, 0, 1, 2, 1], [6, 5, 39, 10, 2]
    n, rows, kept = len(counts), q + w, min(w, BLOCK)
    tokens = torch.randint(0, 90, (n, q), generator=generator)
    states = torch.randn(n * q, width, generator=generator)
    past_tokens = torch.randint(100, 190, (21, kept), generator=generator)
    past_states = torch.randn(21, kept, width, generator=generator)
    past_positions = torch.full((21, kept), -1)
    for r, start in enumerate(starts):
        for position in range(max(start - w, 0), start):
            past_positions[TABLE[r][position // BLOCK], position % BLOCK % kept] = position
    past_positions[TABLE[3][8 // BLOCK], 8 % BLOCK % kept] = 8 + LIMIT  # another text's: a gap from position 8 on

    def full(n: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((n,), -77, dtype=dtype, device=device)

    out: dict[str, Any] = {"token_ids": full(n * rows), "positions": full(n * rows), "slot_mapping": full(n * rows)}
    out |= {"hidden": torch.full((n * rows, width), -7.0, device=device), "last_rows": full(n), "draft_step": full(1)}
    out |= {"seq_lens": full(n, torch.int32), "step_seq_lens": full(n, torch.int32)}
    out["rows_without_block"] = torch.ones(1, dtype=torch.int64, device=device)
    inputs = (
        tokens.to(device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.tensor(starts, device=device),
        torch.tensor(TABLE, dtype=torch.int32, device=device),
        states.to(device),
    )
    kept_rows = {"past_token_ids": past_tokens, "past_positions": past_positions, "past_hidden": past_states}
    given: dict[str, Any] = {name: tensor.to(device) for name, tensor in kept_rows.items()}
    run_op(
        platform,
        way,
        lambda: ops.begin_modules(*inputs, **given, max_model_len=LIMIT, block_size=BLOCK, **out),
        out.values(),
    )
    seen = {name: on_host(tensor).tolist() for name, tensor in out.items()}
    hidden, without = on_host(out["hidden"]), 1
    for r in range(n):
        live, begin = counts[r] > 0, max(starts[r] - w, 0)
        assert seen["seq_lens"][r] == (begin + rows if live else 0)
        assert seen["step_seq_lens"][r] == (starts[r] + counts[r] if live else 0)
        assert r * rows <= seen["last_rows"][r] < (r + 1) * rows
        found, again = starts[r] - begin, True
        for i in reversed(range(rows)):
            row, position = r * rows + i, begin + i
            block, offset = TABLE[r][min(position, LIMIT - 1) // BLOCK], position % BLOCK
            what, slot = f"row {i} of request {r}, position {position},", NULL_SLOT
            if live and found <= i < found + counts[r]:
                assert seen["token_ids"][row] == tokens[r, i - found], what
                expect_equal(hidden[row], states[r * q + i - found], f"{what} hidden state")
                slot = slot_of(position, TABLE[r], LIMIT, BLOCK)
                without += int(position < LIMIT and block == NULL_BLOCK)
            elif live and i < found:
                again = again and int(past_positions[block, offset % kept]) == position
                if again:
                    assert seen["token_ids"][row] == past_tokens[block, offset % kept], what
                    expect_equal(hidden[row], past_states[block, offset % kept], f"{what} hidden state")
                    slot = slot_of(position, TABLE[r], LIMIT, BLOCK)
            assert seen["slot_mapping"][row] == slot, what
            assert 0 <= seen["token_ids"][row] < 190
            assert seen["positions"][row] == (min(position, LIMIT - 1) if live else 0)
        if live:
            assert seen["last_rows"][r] == r * rows + found + counts[r] - 1
    assert seen["draft_step"] == [0]
    assert seen["rows_without_block"] == [without]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("past", PAST)
@case(
    "kernels.keep-rows",
    "Of the rows of a pass the last ones of each KV block are kept, those without a slot are not, and no other entry "
    "changes.",
    hazard="module-past-rows",
    cause="keep_rows: an earlier row of the same entry wins, a rejected or padded row is kept",
    quick=True,
)
def test_keep(platform: Platform, way: str, past: str, seed: int) -> None:
    _keep(platform, way, PAST[past], WIDTH, seed)


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.modules-of-wide-rows",
    "Past rows of 5,000 values are kept, and taken again, with every value.",
    hazard="wide-rows",
    cause="begin_modules or keep_rows: values past a chunk of a row are left out",
)
def test_wide(platform: Platform, way: str, seed: int) -> None:
    _begin(platform, way, 3, 5000, seed)
    _keep(platform, way, 3, 5000, seed)


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.rows-of-a-long-pass",
    "Of a pass of 600 rows the last three of each KV block are kept.",
    hazard="many-in-one-program",
    cause="keep_rows: rows past a tile, or a later row of an entry that is looked for in part of the pass",
)
def test_long_pass(platform: Platform, way: str, seed: int) -> None:
    device, kept, rows, block = platform.device, 3, 600, 16
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows // block + 2, generator=generator) + 1
    positions = torch.arange(rows) + 9
    slots = order[positions // block] * block + positions % block
    slots[500:520] = NULL_SLOT
    tokens, states = torch.randint(0, 90, (rows,), generator=generator), torch.randn(rows, WIDTH, generator=generator)
    entries = torch.zeros(len(order) + 1, kept, dtype=torch.int64)
    into = entries.to(device, copy=True), entries.to(device, copy=True) - 1
    held = torch.zeros(len(order) + 1, kept, WIDTH, device=device)
    ids, hidden, at, to = (tensor.to(device) for tensor in (tokens, states, positions, slots))
    given = ids, hidden, at, to, *into, held
    run_op(platform, way, lambda: ops.keep_rows(*given, block), given[4:])
    wanted = {(int(slots[i]) // block, int(slots[i]) % block % kept): i for i in range(rows) if slots[i] >= 0}
    for (place, entry), row in wanted.items():
        assert int(on_host(into[1])[place, entry]) == positions[row], f"row {row} is not kept"
        assert int(on_host(into[0])[place, entry]) == tokens[row], f"token of row {row}"
        expect_equal(on_host(held)[place, entry], states[row], f"hidden state of row {row}")


def _keep(platform: Platform, way: str, past: int, width: int, seed: int) -> None:
    device, kept = platform.device, min(past, BLOCK)
    generator = torch.Generator().manual_seed(seed)
    spans = [(2, 0, 15, 13), (0, 5, 3, 3), (1, 3, 4, 1), (3, 11, 1, 0), (4, 0, 1, 1)]  # request, first, rows, with slot
    places = [(r, first + i, i < slots) for r, first, rows, slots in spans for i in range(rows)]
    wanted: dict[str, Tensor] = {
        "past_token_ids": torch.randint(0, 9, (21, kept), generator=generator),
        "past_positions": torch.full((21, kept), -1),
        "past_hidden": torch.randn(21, kept, width, generator=generator),
    }
    into = {name: tensor.to(device, copy=True) for name, tensor in wanted.items()}
    tokens = torch.randint(10, 90, (len(places),), generator=generator)
    states = torch.randn(len(places), width, generator=generator)
    slots = [slot_of(position, TABLE[r], LIMIT, BLOCK) if real else NULL_SLOT for r, position, real in places]
    for row, ((_, position, _), slot) in enumerate(zip(places, slots, strict=True)):
        if slot != NULL_SLOT:
            entry = slot // BLOCK, slot % BLOCK % kept
            wanted["past_token_ids"][entry] = tokens[row]
            wanted["past_positions"][entry] = position
            wanted["past_hidden"][entry] = states[row]
    given = [tokens, states, torch.tensor([position for _, position, _ in places]), torch.tensor(slots)]
    there = [tensor.to(device) for tensor in given]
    kept_rows = into["past_token_ids"], into["past_positions"], into["past_hidden"]
    rows = there[0], there[1], there[2], there[3]
    run_op(platform, way, lambda: ops.keep_rows(*rows, *kept_rows, BLOCK), into.values())
    for name, tensor in into.items():
        expect_equal(on_host(tensor), wanted[name], name)
