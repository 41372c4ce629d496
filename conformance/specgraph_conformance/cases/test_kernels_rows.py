"""Ops that fill the rows of a pass, against plain Python loops, eagerly and in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specgraph import ops
from specgraph.attention import NULL_SLOT
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, on_host, run_op, slot_of


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [1, 2, 5])
@case(
    "kernels.begin-propose",
    "Rows, positions, lengths, slots and last rows of a propose are those of a host loop; inert requests are inert.",
    hazard="query-len-zero",
    cause="begin_propose: an inert request's last row, a filler token, or the end of max_model_len",
    quick=True,
)
def test_begin_propose(platform: Platform, way: str, k: int, seed: int) -> None:
    device, q, limit, block = platform.device, k + 1, 40, 16
    generator = torch.Generator().manual_seed(seed)
    counts, starts = [q, 0, 1, min(2, q), 1], [14, 3, 39, 31, 0]
    blocks = [[5, 2, 0], [1, 0, 0], [3, 4, 6], [8, 7, 9], [10, 0, 0]]
    n = len(counts)
    tokens, rows = torch.randint(0, 100, (n, q), generator=generator), n * q

    def full(n: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((n,), -77, dtype=dtype, device=device)

    out: dict[str, Any] = {"token_ids": full(rows), "positions": full(rows), "slot_mapping": full(rows)}
    out |= {"last_rows": full(n), "step_positions": full(n), "step_seq_lens": full(n, torch.int32)}
    out |= {"seq_lens": full(n, torch.int32), "draft_step": full(1)}
    inputs = (
        tokens.to(device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.tensor(starts, device=device),
        torch.tensor(blocks, dtype=torch.int32, device=device),
    )
    run_op(
        platform,
        way,
        lambda: ops.begin_propose(*inputs, max_model_len=limit, block_size=block, **out),
        out.values(),
    )
    seen = {name: on_host(tensor).tolist() for name, tensor in out.items()}
    for r in range(n):
        live = counts[r] > 0
        assert seen["seq_lens"][r] == (starts[r] + q if live else 0)
        assert seen["step_seq_lens"][r] == (starts[r] + counts[r] if live else 0)
        assert r * q <= seen["last_rows"][r] < (r + 1) * q
        assert 0 <= seen["step_positions"][r] < limit, f"request {r} steps at position {seen['step_positions'][r]}"
        if live:
            assert seen["last_rows"][r] == r * q + counts[r] - 1
            assert seen["step_positions"][r] == min(starts[r] + counts[r] - 1, limit - 1)
        for i in range(q):
            row, position = r * q + i, starts[r] + i
            if live and i < counts[r]:
                assert seen["token_ids"][row] == tokens[r, i]
            assert 0 <= seen["token_ids"][row] < 100
            assert 0 <= seen["positions"][row] < limit
            if live:
                assert seen["positions"][row] == min(position, limit - 1)
            wanted = slot_of(position, blocks[r], limit, block) if live else NULL_SLOT
            assert seen["slot_mapping"][row] == wanted
    assert seen["draft_step"] == [0]


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.begin-verify",
    "Rows, positions, lengths and slots of a verify pass are those of a host loop; inert requests are inert.",
    hazard="num-reqs-unpadded",
    cause="begin_verify: a padded request that keeps a length or a slot",
    quick=True,
)
def test_begin_verify(platform: Platform, way: str) -> None:
    device, k, limit, block = platform.device, 3, 40, 16
    last, drafts = [11, 12, 13, 14], [[1, 2, 3], [4, -1, -1], [7, 8, 9], [5, 6, 10]]
    starts, blocks = [14, -1, 38, 0], [[5, 2, 0], [1, 1, 1], [3, 4, 6], [7, 0, 0]]
    rows = 4 * (k + 1)
    token_ids, positions, slots = (torch.full((rows,), -77, device=device) for _ in range(3))
    seq_lens = torch.full((4,), -77, dtype=torch.int32, device=device)
    inputs = (
        torch.tensor(last, device=device),
        torch.tensor(drafts, device=device),
        torch.tensor(starts, device=device),
        torch.tensor(blocks, dtype=torch.int32, device=device),
    )
    out = {"token_ids": token_ids, "positions": positions, "slot_mapping": slots, "seq_lens": seq_lens}
    run_op(platform, way, lambda: ops.begin_verify(*inputs, max_model_len=limit, block_size=block, **out), out.values())
    assert on_host(seq_lens).tolist() == [18, 0, 42, 4]
    for r in range(4):
        for i in range(k + 1):
            row, position = r * (k + 1) + i, starts[r] + i
            if starts[r] < 0:
                assert on_host(slots)[row] == NULL_SLOT
                continue
            assert on_host(token_ids)[row] == max(([last[r], *drafts[r]])[i], 0)
            assert on_host(positions)[row] == min(position, limit - 1)
            assert on_host(slots)[row] == slot_of(position, blocks[r], limit, block)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [1, 3])
@case(
    "kernels.begin-masked",
    "Rows of a drafter that drafts in one causal pass are those of a host loop: sampled tokens, then masked rows "
    "behind the last accepted one, then rows without a slot.",
    hazard="parallel-block-rows",
    cause="begin_masked: masked rows behind the rejected rows instead of the accepted ones, or one of them too many",
    quick=True,
)
def test_begin_masked(platform: Platform, way: str, k: int, seed: int) -> None:
    device, q, limit, block, mask = platform.device, 3, 40, 16, 99
    rows = q + k - 1
    tokens = torch.randint(0, 90, (5, q), generator=torch.Generator().manual_seed(seed))
    counts, starts = [q, 0, 1, 2, 1], [14, 3, 39, 31, 20]
    blocks = [[5, 2, 0], [1, 0, 0], [3, 4, 6], [8, 7, 9], [10, 11, 0]]
    sizes = {"token_ids": rows, "positions": rows, "slot_mapping": rows, "hidden_rows": rows, "draft_rows": k}
    out: dict[str, Any] = {name: torch.full((5 * n,), -77, device=device) for name, n in sizes.items()}
    out["seq_lens"] = torch.full((5,), -77, dtype=torch.int32, device=device)
    inputs = (
        tokens.to(device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.tensor(starts, device=device),
        torch.tensor(blocks, dtype=torch.int32, device=device),
    )
    limits: dict[str, Any] = {"mask_token_id": mask, "max_model_len": limit, "block_size": block}
    run_op(platform, way, lambda: ops.begin_masked(*inputs, **limits, **out), out.values())
    seen = {name: on_host(tensor).tolist() for name, tensor in out.items()}
    for r, (count, start) in enumerate(zip(counts, starts, strict=True)):
        assert seen["seq_lens"][r] == (start + rows if count else 0), f"length of request {r}"
        first = r * rows + max(count - 1, 0)
        assert seen["draft_rows"][r * k : (r + 1) * k] == list(range(first, first + k)), f"drafting rows of request {r}"
        for i in range(rows):
            row, where = r * rows + i, f"row {i} of request {r}"
            kept = count > 0 and i < count + k - 1
            wanted = slot_of(start + i, blocks[r], limit, block) if kept else NULL_SLOT
            assert seen["slot_mapping"][row] == wanted, f"slot of {where}"
            if kept:
                assert seen["positions"][row] == min(start + i, limit - 1), f"position of {where}"
                assert seen["token_ids"][row] == (tokens[r, i] if i < count else mask), f"token of {where}"
            assert seen["hidden_rows"][row] == (r * q + i if i < count else 5 * q), f"hidden state of {where}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [1, 3])
@case(
    "kernels.begin-block",
    "Context rows and block rows of a parallel drafter are those of a host loop: rejected rows have no slot, the block "
    "begins after the last accepted row, inert requests are inert.",
    hazard="parallel-block-rows",
    cause="begin_block: the position of the block's first row, a slot of a rejected row, or the end of max_model_len",
    quick=True,
)
def test_begin_block(platform: Platform, way: str, k: int, seed: int) -> None:
    device, q, limit, block, mask = platform.device, k + 1, 40, 16, 99
    tokens = torch.randint(0, 90, (5, q), generator=torch.Generator().manual_seed(seed))
    counts, starts = [q, 0, 1, min(2, q), 1], [14, 3, 39, 31, 20]
    blocks = [[5, 2, 0], [1, 0, 0], [3, 4, 6], [8, 7, 9], [10, 11, 0]]
    names = ("context_positions", "context_slots", "token_ids", "positions", "slot_mapping")
    out: dict[str, Any] = {name: torch.full((5 * q,), -77, device=device) for name in names}
    out["seq_lens"] = torch.full((5,), -77, dtype=torch.int32, device=device)
    inputs = (
        tokens.to(device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.tensor(starts, device=device),
        torch.tensor(blocks, dtype=torch.int32, device=device),
    )
    limits: dict[str, Any] = {"mask_token_id": mask, "max_model_len": limit, "block_size": block}
    run_op(platform, way, lambda: ops.begin_block(*inputs, **limits, **out), out.values())
    seen = {name: on_host(tensor).tolist() for name, tensor in out.items()}
    for r, (count, start) in enumerate(zip(counts, starts, strict=True)):
        begin = start + count
        assert seen["seq_lens"][r] == (min(begin + q, limit) if count else 0), f"length of request {r}"
        for i in range(q):
            row, where = r * q + i, f"row {i} of request {r}"
            known = i < count
            wanted = slot_of(start + i, blocks[r], limit, block) if known else NULL_SLOT
            assert seen["context_slots"][row] == wanted, f"slot of context {where}"
            if known:
                assert seen["context_positions"][row] == min(start + i, limit - 1), f"position of context {where}"
            wanted = slot_of(begin + i, blocks[r], limit, block) if count else NULL_SLOT
            assert seen["slot_mapping"][row] == wanted, f"slot of block {where}"
            if count:
                assert seen["positions"][row] == min(begin + i, limit - 1), f"position of block {where}"
                assert seen["token_ids"][row] == (mask if i else tokens[r, count - 1]), f"token of block {where}"
            for name in ("context_positions", "positions"):
                assert 0 <= seen[name][row] < limit, f"{name} of {where}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("first", "real"), [(0, 5), (14, 8), (36, 4), (7, 0)])
@case(
    "kernels.begin-prefill",
    "Rows of a padded prompt pass are those of a host loop: padding has no slot, and row i sees the keys up to its "
    "own.",
    hazard="prompt-padding",
    cause="begin_prefill: padded rows that keep a slot, or a length that counts only the real rows",
    quick=True,
)
def test_begin_prefill(platform: Platform, way: str, first: int, real: int) -> None:
    device, rows, limit, block, blocks = platform.device, 8, 40, 16, [7, 3, 5]
    positions, slots = (torch.full((rows,), -77, device=device) for _ in range(2))
    seq_lens, last_row = torch.full((1,), -77, dtype=torch.int32, device=device), torch.full((1,), -77, device=device)
    inputs = (
        torch.tensor([first], device=device),
        torch.tensor([real], device=device),
        torch.tensor([blocks], dtype=torch.int32, device=device),
    )
    out = {"positions": positions, "slot_mapping": slots, "seq_lens": seq_lens, "last_row": last_row}
    run_op(
        platform,
        way,
        lambda: ops.begin_prefill(*inputs, max_model_len=limit, block_size=block, **out),
        out.values(),
    )
    expected = [slot_of(first + i, blocks, limit, block) if i < real else NULL_SLOT for i in range(rows)]
    assert on_host(slots).tolist() == expected, f"slots {on_host(slots).tolist()}, expected {expected}"
    assert on_host(positions)[:real].tolist() == list(range(first, first + real)), "positions of the real rows"
    assert 0 <= int(on_host(positions).min()) <= int(on_host(positions).max()) < limit
    # Row i of T sees seq_len - T + 1 + i keys, which must be first + i + 1.
    length = first + rows if real else 0
    assert int(on_host(seq_lens)) == length, f"length {int(on_host(seq_lens))} for {real} rows of {rows}, not {length}"
    assert int(on_host(last_row)) == max(real - 1, 0), "the last real row"


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.shift-token-ids",
    "Each row takes the token of the row after it, the last accepted row the latest draft token, and live lengths grow "
    "by one.",
    hazard="module-token-shift",
    cause="shift_token_ids: the latest draft token goes to the last row of the request, not the last accepted one",
    quick=True,
)
def test_shift(platform: Platform, way: str, seed: int) -> None:
    device, q = platform.device, 4
    counts = [4, 1, 2, 3, 4, 1, 3, 2, 1]
    n = len(counts)
    tokens = torch.randint(0, 90, (n, q), generator=torch.Generator().manual_seed(seed))
    latest = torch.arange(100, 100 + n)
    lengths = [0 if r == 5 else 20 + r for r in range(n)]
    ids, step = tokens.flatten().clone().to(device), torch.tensor([2], device=device)
    last = torch.tensor([r * q + count - 1 for r, count in enumerate(counts)], device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    there = latest.to(device)
    run_op(platform, way, lambda: ops.shift_token_ids(ids, last, there, seq_lens, step), [ids, seq_lens, step])
    seen = on_host(ids).view(n, q)
    for r, count in enumerate(counts):
        wanted = [*tokens[r, 1:count].tolist(), int(latest[r])]
        assert seen[r, :count].tolist() == wanted, f"accepted rows of request {r}, whose last is row {count - 1}"
    assert on_host(seq_lens).tolist() == [length + 1 if length else 0 for length in lengths]
    assert on_host(step).tolist() == [3]
