"""Linears of any number of rows, against float64: what a tile holds after the last row of x changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from interpreted import DEVICE, INTERPRETED, device, ops
from launched import Launched
from torch import Tensor
from torch.nn import functional

from specgraph.kernels.launch import LaunchOptions, ManyRows
from specgraph.ops import Drafts, Draws, LmHead
from specgraph.ops.draft_sampling import sample_rows
from specgraph.ops.linear import Weight, dequantised, quantised

__all__ = ["device"]

ROWS = [1, 2, 6, 8, 15, 16, 17, 24, 32, 33, 40, 63, 64]


def make(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(torch.float16).to(DEVICE)


def first_rows(rows: int, depth: int) -> Tensor:
    """Rows of a tensor whose further rows are NaN."""
    whole = make(rows + 64, depth)
    whole[rows:] = float("nan")
    return whole[:rows]


def close(got: Tensor, want: Tensor) -> None:
    assert float((got.double() - want).norm() / want.norm()) < 1e-3  # NaN fails too


@pytest.mark.parametrize("rows", ROWS)
def test_linears(rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, residual = first_rows(rows, 256), make(100, 256, scale=1 / 16), make(rows, 100)
    wide = x.double() @ weight.double().T
    close(ops().norm_linear(x, None, Weight(weight), residual), wide + residual.double())
    gate, up = wide.chunk(2, 1)
    close(ops().norm_gate_up(x, None, Weight(weight)), functional.silu(gate) * up)


@pytest.mark.parametrize(("rows", "columns"), [(3, 2), (6, 10), (17, 20), (40, 100)])
def test_a_weight_with_few_rows_or_with_nan(rows: int, columns: int) -> None:
    """A tile is filled up with rows of the weight: there may be fewer than that, and NaN stays in its own column."""
    torch.manual_seed(rows)
    x, weight = first_rows(rows, 256), make(2 * columns, 256, scale=1 / 16)
    weight[columns - 1] = float("nan")
    wide = x.double() @ weight.double().T
    kept = [*range(columns - 1), *range(columns, 2 * columns)]
    got = ops().norm_linear(x, None, Weight(weight))
    close(got[:, kept], wide[:, kept])
    assert bool(got[:, columns - 1].isnan().all())
    gate, up = wide.chunk(2, 1)
    close(ops().norm_gate_up(x, None, Weight(weight))[:, :-1], (functional.silu(gate) * up)[:, :-1])


@pytest.fixture
def empty_is_nan() -> Iterator[None]:
    """Tensors that nothing has written yet are NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert bool(torch.empty(4, dtype=torch.float16, device=DEVICE).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("rows", [1, 6, 16, 24, 63])
def test_linears_over_fp8(rows: int, empty_is_nan: None) -> None:
    torch.manual_seed(rows)
    x, residual = first_rows(rows, 256), make(rows, 100)
    weight = quantised(make(100, 256, scale=1 / 16))
    wide = x.double() @ dequantised(weight.matrix, weight.scale, torch.float32).double().T
    close(ops().norm_linear(x, None, weight, residual), wide + residual.double())
    gate, up = wide.chunk(2, 1)
    close(ops().norm_gate_up(x, None, weight), functional.silu(gate) * up)
    if INTERPRETED:  # the loops read whole tiles: 16, 32 or 64 rows
        assert ops()._scaled(x, None)[0].shape == (max(16, 1 << (rows - 1).bit_length()), 256)


@pytest.mark.parametrize("rows", ROWS)
def test_heads(rows: int) -> None:
    torch.manual_seed(rows)
    x, weight = first_rows(rows, 256), make(300, 256, scale=1 / 16)
    logits = x.double() @ weight.double().T
    token_ids, drafts = (torch.full(size, -7, device=DEVICE) for size in ((rows,), (rows, 2)))
    to = Drafts(drafts, None, torch.zeros(1, dtype=torch.int64, device=DEVICE), token_ids)
    ops().draft_from_hidden(x, LmHead(None, 0.0, weight), to)
    assert bool((logits.gather(1, token_ids[:, None])[:, 0] >= logits.amax(1) - 4e-3).all())
    assert torch.equal(drafts[:, 0], token_ids)
    assert bool((drafts[:, 1] == -7).all())


@pytest.mark.parametrize(
    ("rows", "vocab", "table"),
    [(1, 100, True), (8, 100, False), (16, 20, True), (24, 20, False), (33, 70, True)],
)
def test_heads_of_draws_in_order(rows: int, vocab: int, table: bool) -> None:
    """Logits of a block plus a product, of rows of a table or of x: all are sixteenths, which no sum rounds, and many
    are equal. Rows of the table that nothing takes are NaN."""
    torch.manual_seed(rows)
    dtype, steps = torch.float16 if INTERPRETED else torch.bfloat16, 3
    x, weight = torch.randint(-2, 3, (rows, 256)), torch.randint(-1, 2, (vocab, 256)) / 16
    base, offsets = torch.randint(-32, 33, (steps, rows, vocab)) / 16, torch.randint(0, 50, (vocab,))
    ids = torch.randperm(2 * rows)[:rows]
    states = torch.full((2 * rows, 256), float("nan")).index_copy(0, ids, x.float()) if table else x
    before = torch.stack((ids, ids + 1), dim=1).to(DEVICE)  # a column of the tokens so far
    temperature = (torch.rand(rows) + 0.3) * (torch.arange(rows) % 3 > 0)
    seeds = torch.randint(-(2**62), 2**62, (rows,))
    starts, more = torch.randint(0, 900, (2, rows)).int()
    wide = base[1] + x.double() @ weight.double().T
    head = LmHead(None, 0.0, weight.to(DEVICE, dtype), base.to(DEVICE, dtype)[1])
    head = head._replace(row_ids=before[:, 0] if table else None, turn=None if rows == 24 else rows)
    drafts, probs = torch.full((rows, steps), -7).to(DEVICE), torch.full((rows, steps, vocab), -7.0).to(DEVICE)
    to = Drafts(drafts[:, 1:2], offsets.to(DEVICE))
    ops().draft_from_hidden(states.to(DEVICE, dtype), head, to)
    best = wide.argmax(-1)  # the first of equals
    assert torch.equal(drafts[:, 1].cpu(), best + offsets[best])
    how = Draws(temperature, seeds, starts, more, probs.cpu())
    tokens, wanted = sample_rows(wide, 1, how)
    there = Draws(*(tensor.to(DEVICE) for tensor in how[:4]), probs[:, 1:2])
    ops().draft_from_hidden(states.to(DEVICE, dtype), head, to, there)
    assert torch.equal(drafts[:, 1].cpu(), tokens + offsets[tokens])
    assert bool((drafts[:, ::2] == -7).all())
    torch.testing.assert_close(probs[:, 1].cpu(), wanted.float(), rtol=1e-4, atol=1e-6)
    assert bool((probs[:, ::2] == -7).all())


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("rows", "columns", "split"), [(65, 100, 1), (70, 128, 4), (66, 96, 3)])
def test_parts_of_a_device_s_own_linear_are_added(rows: int, columns: int, split: int, residual: bool) -> None:
    torch.manual_seed(rows)
    parts, x, weight = torch.randn(split, rows, columns).to(DEVICE), make(rows, 32), make(columns, 32)
    more = make(rows, columns + 8)[:, :columns] if residual else None
    own = ManyRows(lambda *_: True, lambda x, weight: None, lambda x, weight: parts, lambda *_: None)
    got = Launched(LaunchOptions(many_rows=own)).norm_linear(x, None, Weight(weight), more)
    close(got, parts.double().sum(0) + (0 if more is None else more.double()))
