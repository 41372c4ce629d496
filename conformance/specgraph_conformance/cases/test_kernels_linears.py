"""Linears, heads and expert MLPs where their optional parts meet: bias, residual, eps, many rows, clamps."""

from __future__ import annotations

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.linear_oracles import (
    EPS,
    TOLERANCE,
    expect_magnitudes,
    expect_rows,
    gated,
    norm_weight,
    normed,
    random,
    uneven_rows,
)
from specgraph_conformance.rig import WAYS, expect_close, expect_equal, on_host, run_op

ROWS = 133
"""More than a tile of 128 rows, and no multiple of one."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.mark.parametrize("way", WAYS)
@DTYPES
@case(
    "kernels.linears-of-many-rows",
    "Linears over 133 rows of different magnitude, with every choice of norm, bias and residual and a large eps, are "
    "within rounding of float64.",
    hazard="linears-of-many-rows",
    cause="an eps that is baked in, a bias that is lost where there is a residual, or rows past a tile",
)
def test_linears(platform: Platform, way: str, dtype: torch.dtype, seed: int) -> None:
    size, width, tokens = 64, 48, 50
    x, hidden, residual = (uneven_rows(ROWS, n, dtype, seed + i) for i, n in enumerate((size, size, width)))
    norms = [norm_weight(size, dtype, seed + i) for i in (3, 4)]
    weight, bias = random((width, size), dtype, seed + 5, 1 / 8), random((width,), dtype, seed + 6)
    both = random((width, 2 * size), dtype, seed + 7, 1 / 11)
    table = random((tokens, size), dtype, seed + 8)
    ids = torch.arange(ROWS) % tokens
    tensors = (x, hidden, residual, *norms, weight, bias, both, table, ids)
    a, h, r, n0, n1, w, b, w2, t, i = (each.to(platform.device) for each in tensors)
    plain = [(norm, bias_, added) for norm in (None, n0) for bias_ in (None, b) for added in (None, r)]
    pairs = [(first, second) for first in (None, n0) for second in (None, n1)]
    gates = [None, b]
    out = [torch.zeros(ROWS, width, dtype=dtype, device=platform.device) for _ in (*plain, *pairs)]
    halves = [torch.zeros(ROWS, width // 2, dtype=dtype, device=platform.device) for _ in gates]

    def work() -> None:
        for into, (norm, bias_, added) in zip(out, plain, strict=False):
            into.copy_(ops.norm_linear(a, norm, EPS, w, bias_, added))
        for into, (first, second) in zip(out[len(plain) :], pairs, strict=True):
            into.copy_(ops.pair_linear(i, t, first, h, second, EPS, w2, b))
        for into, bias_ in zip(halves, gates, strict=True):
            into.copy_(ops.norm_gate_up(a, n0, EPS, w, bias_))

    run_op(platform, way, work, [*out, *halves])

    for seen, (norm, bias_, added) in zip(out, plain, strict=False):
        product = normed(x, None if norm is None else norms[0]) @ weight.double().T
        wanted = product + (0 if bias_ is None else bias.double()) + (0 if added is None else residual.double())
        parts = [name for name, part in (("norm", norm), ("bias", bias_), ("residual", added)) if part is not None]
        expect_rows(seen, wanted, f"norm_linear with {' and '.join(parts) or 'nothing'}")
    for seen, (first, second) in zip(out[len(plain) :], pairs, strict=True):
        embedded = normed(table[ids], None if first is None else norms[0])
        states = normed(hidden, None if second is None else norms[1])
        wanted = torch.cat((embedded, states), dim=-1) @ both.double().T + bias.double()
        parts = [name for name, norm in (("embedding", first), ("hidden state", second)) if norm is not None]
        expect_rows(seen, wanted, f"pair_linear with a norm of {' and '.join(parts) or 'neither'}")
    for seen, bias_ in zip(halves, gates, strict=True):
        product = normed(x, norms[0]) @ weight.double().T + (0 if bias_ is None else bias.double())
        expect_rows(seen, gated(product), f"norm_gate_up {'with' if bias_ is not None else 'without'} bias")


@pytest.mark.parametrize("rows", [5, 40, ROWS])
@pytest.mark.parametrize("way", WAYS)
@DTYPES
@case(
    "kernels.two-linears",
    "Two linears with the residual sum and the norm between them, with and without biases, are within rounding of "
    "float64 in rows of every magnitude.",
    hazard="fused-linears",
    cause="linear_norm_linear or linear_norm_gate_up: the residual or a bias left out, a baked eps, or a root mean "
    "square of other rows or of a part of the columns",
)
def test_two_linears(platform: Platform, way: str, dtype: torch.dtype, rows: int, seed: int) -> None:
    size, width, inner = 64, 80, 24
    x, residual = random((rows, size), dtype, seed), uneven_rows(rows, width, dtype, seed + 1)
    norm = norm_weight(width, dtype, seed + 2)
    weight, bias = random((width, size), dtype, seed + 3, 1 / 20), random((width,), dtype, seed + 4, 1 / 20)
    following, next_bias = random((2 * inner, width), dtype, seed + 5, 1 / 9), random((2 * inner,), dtype, seed + 6)
    tensors = (x, residual, norm, weight, bias, following, next_bias)
    a, r, n, w, b, w2, b2 = (each.to(platform.device) for each in tensors)
    out = [
        torch.zeros(rows, columns, dtype=dtype, device=platform.device) for columns in (width, 2 * inner, width, inner)
    ]

    for biases in (True, False):
        first, second = (b, b2) if biases else (None, None)

        def run(first: Tensor | None = first, second: Tensor | None = second) -> None:
            results = (
                *ops.linear_norm_linear(a, w, first, r, n, EPS, w2, second),
                *ops.linear_norm_gate_up(a, w, first, r, n, EPS, w2, second),
            )
            for into, result in zip(out, results, strict=True):
                into.copy_(result)

        run_op(platform, way, run, out)
        total = x.double() @ weight.double().T + residual.double() + (bias.double() if biases else 0)
        product = normed(total, norm) @ following.double().T + (next_bias.double() if biases else 0)
        wanted = total, product, total, gated(product)
        names = "sum", "second product", "sum before the gate", "gated product"
        for seen, values, name in zip(out, wanted, names, strict=True):
            expect_magnitudes(seen, values, f"{name} with{'' if biases else 'out'} biases")


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.heads-of-many-requests",
    "For 133 requests the fused projections take the lowest id among equal logits, and write the distribution of "
    "float64's logits with the norm's own eps.",
    hazard="linears-of-many-rows",
    cause="greedy_head or gumbel_head: rows past a tile, a baked eps, or a maximum that takes the last of equals",
)
def test_heads(platform: Platform, way: str, seed: int) -> None:
    device, size, vocab = platform.device, 32, 700
    # Small integers: every sum is exact in float32, so that equal logits are equal in every order of the sums.
    x = torch.randint(-3, 4, (ROWS, size), generator=torch.Generator().manual_seed(seed)).float()
    weight = torch.randint(-3, 4, (vocab // 2, size), generator=torch.Generator().manual_seed(seed + 1)).float()
    weight = torch.cat((weight, weight.flip(0)))  # every logit twice
    rows, matrix = x.to(device), weight.to(device)
    ids, drafts = torch.full((ROWS,), -7, device=device), torch.full((ROWS, 2), -7, device=device)
    step = torch.tensor([1], device=device)
    run_op(platform, way, lambda: ops.greedy_head(rows, None, EPS, matrix, None, step, ids, drafts), [ids, drafts])
    best = torch.tensor([row.index(max(row)) for row in (x.double() @ weight.double().T).tolist()])
    expect_equal(on_host(ids), best, "the tokens of equal logits")
    expect_equal(on_host(drafts)[:, 1], best, "the column of the step")
    x, norm = uneven_rows(ROWS, size, torch.float32, seed + 2), 1 + random((size,), torch.float32, seed + 3) / 4
    weight = random((9, size), torch.float32, seed + 4, 0.3)
    probs = torch.zeros(ROWS, 2, 9, device=device)
    tensors = x, norm, weight, torch.full((ROWS,), 0.7), torch.arange(ROWS), torch.arange(ROWS).int() + 1
    rows, scale, matrix, temperature, seeds, lengths = (t.to(device) for t in tensors)
    written = ids, drafts, probs
    run_op(
        platform,
        way,
        lambda: ops.gumbel_head(rows, scale, EPS, matrix, None, temperature, seeds, lengths, step, ids, drafts, probs),
        written,
    )
    wanted = ((normed(x, norm) @ weight.double().T) / 0.7).softmax(-1)
    expect_close(on_host(probs)[:, 1], wanted, 1e-4, "the distributions of the fused sampling")


@pytest.mark.parametrize("way", WAYS)
@DTYPES
@case(
    "kernels.expert-mlp-clamped",
    "Experts with biases and the clamped activation of gpt-oss, four per row and some chosen by no row, give float64's "
    "weighted sum.",
    cause="expert_mlp: a bias of another expert, a gate that is clamped below, or weights that are made to add up to 1",
)
def test_expert_mlp(platform: Platform, way: str, dtype: torch.dtype, seed: int) -> None:
    rows, experts, top_k, size, inner, alpha, limit = 37, 9, 4, 64, 32, 1.7, 2.0
    g = torch.Generator().manual_seed(seed)
    x, gate_up, down = (
        (torch.randn(*shape, generator=g) * scale).to(dtype)
        for shape, scale in (
            ((rows, size), 1.0), ((experts, 2 * inner, size), 0.5), ((experts, size, inner), 0.15)
        )
    )  # fmt: skip
    gate_up_bias, down_bias = ((torch.randn(experts, n, generator=g)).to(dtype) for n in (2 * inner, size))
    ids = torch.stack([torch.randperm(experts - 2, generator=g)[:top_k] for _ in range(rows)])
    weights = torch.rand(rows, top_k, generator=g)
    there = [t.to(platform.device) for t in (x, ids, weights, gate_up, down, gate_up_bias, down_bias)]
    out = torch.zeros_like(there[0])
    run_op(platform, way, lambda: out.copy_(ops.expert_mlp(*there, alpha=alpha, limit=limit)), [out])
    wanted = torch.zeros(rows, size, dtype=torch.float64)
    for row in range(rows):
        for expert, weight in zip(ids[row].tolist(), weights[row].double(), strict=True):
            gate, up = (gate_up[expert].double() @ x[row].double() + gate_up_bias[expert].double()).chunk(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            result = down[expert].double() @ (gate * torch.sigmoid(alpha * gate) * (up + 1))
            wanted[row] += weight * (result + down_bias[expert].double())
    expect_close(on_host(out).double(), wanted, TOLERANCE[dtype], "expert_mlp")
