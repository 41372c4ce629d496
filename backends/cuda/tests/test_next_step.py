"""The op between two greedy draft steps, against its plain torch reference, and again for the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import DEVICE, device, ops
from torch import Tensor

from specgraph import ops as kernels

__all__ = ["device"]

LIMIT, BLOCK = 40, 4


def whole(*shape: int) -> Tensor:
    """Small integers in float16: products are exact in any order of the sums, so equal logits are equal everywhere."""
    return torch.randint(-2, 3, shape).to(torch.float16)


def plain(table: Tensor) -> Tensor:
    return table


def part_of_rows(table: Tensor) -> Tensor:
    """The same values, in rows that are longer than that."""
    return torch.cat((table, table[:, :32]), dim=1)[:, : table.shape[1]]


def column_by_column(table: Tensor) -> Tensor:
    """The same values, those of a column one after the other."""
    return table.t().contiguous().t()


def records(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The tensors as the op takes them."""
    drafts = kernels.Drafts(*(tensors.pop(name) for name in kernels.Drafts._fields))
    head = kernels.LmHead(None, 0.0, tensors.pop("weight"))
    pair = kernels.PairInput(*(tensors.pop(name) for name in ("table", "table_norm", "hidden_norm")), 0.01)
    return {**tensors, "head": head, "drafts": drafts, "pair": pair}


@pytest.mark.parametrize(
    ("requests", "normed", "mapped", "stored"),
    [
        (1, True, True, plain),
        (5, True, False, part_of_rows),
        (6, True, True, column_by_column),
        (33, False, True, plain),
        (70, True, True, part_of_rows),
        (70, True, False, column_by_column),
    ],
)
def test_three_steps(requests: int, normed: bool, mapped: bool, stored: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(requests)
    size, width, vocab, blocks = 128, 96, 300, LIMIT // BLOCK
    weight = whole(vocab // 2, size)
    weight = torch.cat((weight, weight))  # every logit twice: the lowest id counts
    offsets = torch.randint(0, 50, (vocab,)) if mapped else None
    table = torch.randn(vocab + 50, width).to(torch.float16)
    norms = [torch.randn(n).to(torch.float16) if normed else None for n in (width, size)]
    lens = torch.randint(1, LIMIT + 1, (requests,)).int()
    lens[::4] = 0  # inert
    lens[1::4] = LIMIT - 1  # the last position, then past it
    blocks_of = torch.randint(0, 3, (requests, blocks)).int()  # block 0 is the null block
    places = {
        "draft_step": torch.tensor([0]), "token_ids": torch.full((requests,), -7),
        "draft_token_ids": torch.full((requests, 4), -7), "seq_lens": lens, "positions": torch.full((requests,), -7),
        "slot_mapping": torch.full((requests,), -7),
    }  # fmt: skip
    there = {name: tensor.clone().to(DEVICE) for name, tensor in places.items()}
    fixed = {"weight": weight, "draft_to_target": offsets, "block_table": blocks_of, "table": table}
    fixed |= {"table_norm": norms[0], "hidden_norm": norms[1]}
    limits = {"max_model_len": LIMIT, "block_size": BLOCK}
    for _ in range(3):
        x, hidden = whole(requests, size), torch.randn(requests, size + 8).to(torch.float16)[:, :size]
        wanted = kernels.greedy_next_step.reference(**records(places | fixed), **limits, x=x, hidden=hidden)
        moved = {name: None if t is None else t.to(DEVICE) for name, t in fixed.items()}
        moved["table"] = stored(moved["table"])
        pair = ops().greedy_next_step(**records(there | moved), **limits, x=x.to(DEVICE), hidden=hidden.to(DEVICE))
        for name, expected in places.items():
            assert torch.equal(there[name].cpu(), expected), name
        torch.testing.assert_close(pair.cpu().float(), wanted.float(), rtol=4e-3, atol=4e-3)
    assert places["draft_step"].item() == 3
