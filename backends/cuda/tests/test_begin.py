"""The first node of each pass, and the copy of a round before it: the Triton kernels write what the references write.

With TRITON_INTERPRET=1 the tests also run without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, device, expect, run
from torch import Tensor

from specgraph import ops

__all__ = ["device"]  # the fixture

LIMITS = {"max_model_len": 70, "block_size": 16}


def rounds(requests: int, query_len: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rounds with inert requests, rows past max_model_len and null blocks."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, query_len + 1, (requests,), generator=g).int()
    starts = torch.randint(0, 70 - 1, (requests,), generator=g)
    table = torch.randint(0, 9, (requests, 6), generator=g).int()
    return torch.randint(0, 99, (requests, query_len), generator=g), counts, starts, table


def rows(count: int, requests: int) -> dict[str, Tensor]:
    """What every pass writes, filled with something else."""
    written = {name: torch.full((count,), -7) for name in ("token_ids", "positions", "slot_mapping")}
    return written | {"seq_lens": torch.full((requests,), -7, dtype=torch.int32)}


@pytest.mark.parametrize(("requests", "query_len"), [(1, 1), (5, 2), (9, 4)])
def test_rows_of_a_chain_a_block_and_a_verify(requests: int, query_len: int) -> None:
    round_ = rounds(requests, query_len, 1)
    last = {"last_rows": torch.zeros(requests).long(), "step_positions": torch.zeros(requests).long()}
    last |= {"step_seq_lens": torch.zeros(requests).int(), "draft_step": torch.ones(1).long()}
    written = rows(requests * query_len, requests) | last
    expect("begin_propose", *round_, **LIMITS, written=written)
    holes = (*round_[:3], round_[3] * torch.tensor([1, 0, 1, 0, 0, 1]).int())
    counter = {"rows_without_block": torch.tensor([5])}
    expect("begin_propose", *holes, later_rows=3, **LIMITS, written=written | counter)
    context = {name: torch.zeros(requests * query_len).long() for name in ("context_positions", "context_slots")}
    written = rows(requests * 4, requests) | context
    expect("begin_block", *round_, mask_token_id=98, **LIMITS, written=written)
    counted = expect("begin_block", *holes, mask_token_id=98, **LIMITS, written=written | counter)
    assert counted["rows_without_block"] > 5 or requests == 1
    drafts, starts = round_[0] - 3, round_[2] - 2  # -1 and less: no draft token, an inert request
    written = rows(requests * (query_len + 1), requests)
    expect("begin_verify", starts.abs(), drafts, starts, round_[3], **LIMITS, written=written)


@pytest.mark.parametrize(("requests", "past", "block_size"), [(1, 1, 16), (5, 3, 16), (9, 6, 4), (4, 2, 1)])
def test_rows_of_a_drafter_with_modules(requests: int, past: int, block_size: int) -> None:
    """Past rows that are kept, of another position, and in the null block; then what is kept of the pass."""
    g = torch.Generator().manual_seed(requests)
    limits, (sampled, counts, starts, table) = {"max_model_len": 70, "block_size": block_size}, rounds(requests, 4, 3)
    table = torch.randint(0, 9, (requests, 96 // block_size), generator=g).int()
    kept, length, size = min(past, block_size), past + 4, 2100
    positions = torch.full((9, kept), -1)
    for r in range(requests):
        for position in range(max(int(starts[r]) - past, 0), int(starts[r])):
            positions[table[r, position // block_size], position % block_size % kept] = position
    ring = {"past_token_ids": torch.randint(0, 99, (9, kept), generator=g), "past_positions": positions}
    ring |= {"past_hidden": torch.randn(9, kept, size, generator=g)}
    written = rows(requests * length, requests) | {"hidden": torch.zeros(requests * length, size)}
    written |= {"last_rows": torch.zeros(requests).long(), "step_seq_lens": torch.zeros(requests).int()}
    written |= {"draft_step": torch.ones(1).long(), "rows_without_block": torch.tensor([5])}
    states = torch.randn(requests * 4, size, generator=g)
    there = {name: tensor.to(DEVICE) for name, tensor in ring.items()}  # read, and not copied by `expect`
    seen = run("begin_modules", sampled, counts, starts, table, states, **there, **limits, written=written)
    wanted = {name: tensor.clone() for name, tensor in written.items()}
    ops.begin_modules.reference(sampled, counts, starts, table, states, **ring, **limits, **wanted)
    for name, tensor in wanted.items():
        assert torch.equal(seen[name], tensor), name
    assert ((wanted["slot_mapping"] >= 0) & (wanted["positions"] < starts.repeat_interleave(length))).any()
    slots = wanted["slot_mapping"].clone()
    for r in range(1, requests):  # a block of two requests would be written by both
        own, before = slots[r * length : (r + 1) * length], slots[: r * length]
        own[torch.isin(own // block_size, before // block_size)] = -1
    passed = (wanted["token_ids"], wanted["hidden"], wanted["positions"], slots)
    expect("keep_rows", *passed, block_size=block_size, written=ring)
    shifted = {name: wanted[name] for name in ("token_ids", "last_rows", "draft_step")}
    shifted |= {"latest": torch.arange(100, 100 + requests), "seq_lens": wanted["step_seq_lens"]}
    expect("shift_token_ids", written=shifted)


@pytest.mark.parametrize("columns", [4, 6])
def test_a_round_of_the_first_columns_of_a_wider_one(columns: int) -> None:
    """And of a narrower block table, over fewer requests than the buffers hold."""
    sampled, counts, starts, table = rounds(3, columns, 5)
    written = {
        "to_sampled_token_ids": torch.full((5, 4), -7),
        "to_num_sampled": torch.full((5,), -7, dtype=torch.int32),
        "to_start_positions": torch.full((5,), -7),
        "to_aux_hidden": torch.full((20, 10), -7.0),
        "to_block_table": torch.full((5, 8), -7, dtype=torch.int32),
    }
    expect("load_round", sampled[:, :4], counts, starts, torch.randn(12, 10), table, written=written)
