"""The first node of each pass, and the copy of a round before it: the Triton kernels write what the references write.

With TRITON_INTERPRET=1 the tests also run without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import device, expect
from torch import Tensor

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
