"""Triton ops of rows, positions and slots, and of rounds, against their references on the CPU: equal integers."""

from __future__ import annotations

import pytest
import torch
from against_float64 import make, triton_ops  # noqa: F401
from torch import Tensor


def _same_on_both(name: str, arguments: list, **named: Tensor | int) -> None:
    """Run one op on the device and, by its reference, on the CPU; every argument must end up equal."""
    op = getattr(torch.ops.specgraph, name).default
    host = [a.cpu() if isinstance(a, Tensor) else a for a in arguments]
    named_host = {key: a.cpu() if isinstance(a, Tensor) else a for key, a in named.items()}
    op(*arguments, **named)
    op(*host, **named_host)
    pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(arguments, host, strict=True))]
    for what, device, cpu in pairs + [(key, a, named_host[key]) for key, a in named.items()]:
        if isinstance(device, Tensor):
            assert torch.equal(device.cpu(), cpu), f"{name}, argument {what}"


@pytest.mark.parametrize("requests", [1, 5, 64])
@pytest.mark.parametrize("query_len", [1, 2, 6])
def test_rows_positions_and_slots(requests: int, query_len: int) -> None:
    def long(*shape: int, high: int = 90) -> Tensor:
        return torch.randint(0, high, shape, device="cuda")

    table = long(requests, 8, high=50).int()
    counts = long(requests, high=query_len + 1).int()
    rows = requests * query_len
    limits = {"max_model_len": 96, "block_size": 16}

    def rows_out(count: int) -> dict[str, Tensor]:
        tensors = {name: long(count) for name in ("token_ids", "positions", "slot_mapping")}
        return tensors | {"seq_lens": long(requests).int()}

    step_out = {"last_rows": long(requests), "step_positions": long(requests), "step_seq_lens": long(requests).int()}
    step = long(1)
    starts = long(requests, high=140) - 10
    handed = [long(requests, query_len), counts, starts, table]
    _same_on_both("begin_propose", handed, **limits, **rows_out(rows), **step_out, draft_step=step)
    drafts = long(requests, query_len) - 5  # some are negative: no draft token
    verified = [long(requests), drafts, starts, table]
    _same_on_both("begin_verify", verified, **limits, **rows_out(rows + requests))
    verified[0], verified[2] = long(requests, 3)[:, 1], long(requests, 2, high=140)[:, 0] - 10  # columns of others
    _same_on_both("begin_verify", verified, **limits, **rows_out(rows + requests))
    for _ in range(3):
        _same_on_both("advance", [long(requests, high=120).int(), long(requests), long(requests), step, table, 96, 16])
    _same_on_both("take_rows", [make(rows, 4096), long(requests, high=rows), make(requests, 4096)])
    _same_on_both("take_rows", [make(rows, 40), None, make(rows, 40)])
    n = max(1, requests // 2)
    part = [long(n, query_len), counts[:n], starts[:n], make(n * query_len, 12288), table[:n, :5]]
    _same_on_both("load_round", part, **round_buffers(requests, query_len, 12288, 8))
    part[0] = long(n, query_len + 2)[:, :query_len]  # the first columns of a tensor for rounds of more rows
    _same_on_both("load_round", part, **round_buffers(requests, query_len, 12288, 8))
    stops = long(requests, 16, high=6) - 1  # -1 is none
    _same_on_both("stop_finished", [long(requests, query_len, high=9), counts, long(requests, high=9), stops])
    ring, progress, again = long(3, 1502), long(2, high=9), long(1).int()
    live = [long(requests, query_len, high=9), counts, long(requests, high=9), stops]
    for rounds_per_launch in (1, 4, 16):
        _same_on_both("publish_round", [long(1500), *live, ring, progress, again, rounds_per_launch])
    most = long(requests, 8)[:, : query_len - 1]  # of a K below the largest
    moved = [long(requests, query_len), counts, most, starts, long(requests), long(requests, query_len - 1)]
    _same_on_both("next_verify", moved)
    context = {"context_positions": long(rows), "context_slots": long(rows)}
    _same_on_both("begin_block", handed, mask_token_id=7, **limits, **context, **rows_out(requests * 4))
    for drafts in (1, 3, 7):
        length = query_len + drafts - 1
        taken = {"hidden_rows": long(requests * length), "draft_rows": long(requests * drafts)}
        _same_on_both("begin_masked", handed, mask_token_id=7, **limits, **taken, **rows_out(requests * length))


def round_buffers(requests: int, query_len: int, aux_size: int, blocks: int) -> dict[str, Tensor]:
    """What `load_round` writes, filled with other values."""
    return {
        "to_sampled_token_ids": torch.full((requests, query_len), -7, device="cuda"),
        "to_num_sampled": torch.full((requests,), -7, dtype=torch.int32, device="cuda"),
        "to_start_positions": torch.full((requests,), -7, device="cuda"),
        "to_aux_hidden": make(requests * query_len, aux_size),
        "to_block_table": torch.full((requests, blocks), -7, dtype=torch.int32, device="cuda"),
    }


def test_a_round_of_any_alignment_is_loaded() -> None:
    """The first launch compiles for aligned tensors, and what it compiled must not serve others."""
    table = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    for shift in (0, 1, 0, 3):
        flat = torch.randn(12 * 40 + shift, device="cuda").bfloat16()[shift:]
        starts = torch.arange(2 + shift, device="cuda")[shift:]
        counts = torch.ones(2 + shift, dtype=torch.int32, device="cuda")[shift:]
        sampled = torch.randint(0, 9, (2, 6), device="cuda")
        _same_on_both("load_round", [sampled, counts, starts, flat.view(12, 40), table], **round_buffers(3, 6, 40, 6))
