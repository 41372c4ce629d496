"""Linears of the sizes for which devices have kernels of their own: half precision, input columns that tiles divide.

The sizes of the tiny models reach plain matmuls on many devices. Here input columns are multiples of 128 and of 512,
rows fill tiles of 16, 32 and 64 or part of them, and output columns are few, many, or no multiple of a tile.
"""

from __future__ import annotations

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.linear_oracles import (
    EPS,
    expect_magnitudes,
    expect_rows,
    gated,
    norm_weight,
    normed,
    random,
    uneven_rows,
)
from specgraph_conformance.rig import WAYS, on_host, run_op

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.mark.parametrize("rows", [1, 16, 24, 64])
@pytest.mark.parametrize("size", [384, 512])
@pytest.mark.parametrize("way", WAYS)
@HALVES
@case(
    "kernels.linears-in-tiles",
    "Linears of 384 and of 512 input columns, with and without norm, bias and residual, gated, of an embedding and a "
    "hidden state, and two with a norm between them, are within rounding of float64.",
    hazard="linears-in-tiles",
    cause="a kernel for half precision and few rows: rows or columns past a tile, a bias or residual of another tile, "
    "an eps that is baked in, or squares of a part of the columns",
)
def test_linears(platform: Platform, way: str, dtype: torch.dtype, size: int, rows: int, seed: int) -> None:
    device, width, inner, tokens = platform.device, 200, 130, 40
    x, hidden = uneven_rows(rows, size, dtype, seed), uneven_rows(rows, size // 2, dtype, seed + 1)
    residual, sums = (uneven_rows(rows, n, dtype, seed + 2) for n in (width, size))
    norm, halves = norm_weight(size, dtype, seed + 3), [norm_weight(size // 2, dtype, seed + i) for i in (4, 5)]
    weights = [random((n, size), dtype, seed + 6 + i, size**-0.5) for i, n in enumerate((width, 2 * inner, size))]
    biases = [random((n,), dtype, seed + 9 + i) for i, n in enumerate((width, 2 * inner, size))]
    table, ids = random((tokens, size // 2), dtype, seed + 12), torch.arange(rows) * 7 % tokens
    there = [t.to(device) for t in (x, hidden, residual, sums, norm, *halves, *weights, *biases, table, ids)]
    a, h, r, s, n, n0, n1, w, gate_up, square, b, gate_bias, square_bias, t, i = there
    out = {
        name: torch.zeros(rows, columns, dtype=dtype, device=device)
        for name, columns in (
            ("norm_linear", width), ("norm_linear with bias and residual", width), ("norm_gate_up", inner),
            ("pair_linear", width), ("sum before a linear", size), ("linear_norm_linear", width),
            ("sum before a gate", size), ("linear_norm_gate_up", inner), ("second without biases", width),
        )
    }  # fmt: skip

    def work() -> None:
        results = (
            ops.norm_linear(a, n, EPS, w),
            ops.norm_linear(a, None, EPS, w, b, r),
            ops.norm_gate_up(a, n, EPS, gate_up, gate_bias),
            ops.pair_linear(i, t, n0, h, n1, EPS, w, b),
            *ops.linear_norm_linear(a, square, square_bias, s, n, EPS, w, b),
            *ops.linear_norm_gate_up(a, square, square_bias, s, n, EPS, gate_up, gate_bias),
            ops.linear_norm_linear(a, square, None, s, n, EPS, w, None)[1],
        )
        for into, result in zip(out.values(), results, strict=True):
            into.copy_(result)

    run_op(platform, way, work, out.values())
    plain, gates, squares = (weight.double().T for weight in weights)
    pair = torch.cat((normed(table[ids], halves[0]), normed(hidden, halves[1])), dim=-1)
    total = x.double() @ squares + sums.double()
    summed = total + biases[2].double()
    wanted = (
        normed(x, norm) @ plain,
        x.double() @ plain + biases[0].double() + residual.double(),
        gated(normed(x, norm) @ gates + biases[1].double()),
        pair @ plain + biases[0].double(),
        summed,
        normed(summed, norm) @ plain + biases[0].double(),
        summed,
        gated(normed(summed, norm) @ gates + biases[1].double()),
        normed(total, norm) @ plain,
    )
    for (name, seen), values in zip(out.items(), wanted, strict=True):
        expect_magnitudes(seen, values, name)


@pytest.mark.parametrize("rows", [10, 30, 60])
@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.linears-of-many-columns",
    "Linears of up to 9,000 output columns, and gated ones of up to 14,000, are within rounding of float64.",
    hazard="linears-in-tiles",
    cause="the tile that is chosen for so many columns: its last columns, or a gate of other columns",
)
def test_columns(platform: Platform, way: str, rows: int, seed: int) -> None:
    dtype, size, device = torch.bfloat16, 512, platform.device
    x, norm = uneven_rows(rows, size, dtype, seed), norm_weight(size, dtype, seed + 1)
    base, rest = x.to(device), norm.to(device)
    for kind, columns in (("plain", 3000), ("plain", 6000), ("plain", 9000), ("gated", 9000), ("gated", 14000)):
        weight = random((columns if kind == "plain" else 2 * columns, size), dtype, seed + columns, size**-0.5)
        there = weight.to(device)
        out = torch.zeros(rows, columns, dtype=dtype, device=device)

        def work(kind: str = kind, there: Tensor = there, out: Tensor = out) -> None:
            linear = ops.norm_linear if kind == "plain" else ops.norm_gate_up
            out.copy_(linear(base, rest, EPS, there))

        run_op(platform, way, work, [out])
        product = normed(x, norm) @ weight.double().T
        expect_rows(out, product if kind == "plain" else gated(product), f"{kind} linear of {columns} columns")


@pytest.mark.parametrize(("inner", "rows"), [(14336, 70), (14336, 130), (14336, 200), (14336, 300), (12288, 100)])
@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.mlp-of-many-requests",
    "The MLP of a model of 8 billion parameters over 70 to 300 rows of bfloat16, its gate, its second linear with the "
    "residual, and that linear with the norm and the linear after it, is within rounding of float64.",
    hazard="linears-in-tiles",
    cause="a kernel for more rows than a tile: blocks of rows or columns, sums of parts, or rows past the last block",
)
def test_mlp(platform: Platform, way: str, inner: int, rows: int, seed: int) -> None:
    _mlp(platform, way, (inner, 4096), rows, seed)


@pytest.mark.parametrize(
    ("inner", "size", "rows"), [(9728, 2560, 40), (9728, 2560, 64), (17408, 2048, 5), (14336, 4096, 48)]
)
@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.mlp-of-tens-of-requests",
    "The MLPs of models of several sizes over 5 to 64 rows of bfloat16, gate, second linear with the residual, and "
    "that with the norm and the linear after it, are within rounding of float64.",
    hazard="linears-in-tiles",
    cause="a kernel for wide or deep linears: rows of a tile that are not there, blocks of columns that end past the "
    "last one, or sums of parts",
)
def test_mlp_of_tens(platform: Platform, way: str, inner: int, size: int, rows: int, seed: int) -> None:
    _mlp(platform, way, (inner, size), rows, seed)


def _mlp(platform: Platform, way: str, sizes: tuple[int, int], rows: int, seed: int) -> None:
    """sizes: columns of the gate, and of the residual."""
    (inner, size), dtype, after, device = sizes, torch.bfloat16, 96, platform.device
    gate_up, gates = _repeated(2 * inner, size, seed)
    down, sums = _repeated(size, inner, seed + 1)
    x, middle = (uneven_rows(rows, n, dtype, seed + 2 + i) for i, n in enumerate((size, inner)))
    residual, norm = uneven_rows(rows, size, dtype, seed + 4), norm_weight(size, dtype, seed + 5)
    last = random((after, size), dtype, seed + 6, size**-0.5)
    there = [t.to(device) for t in (x, middle, residual, norm, gate_up, down, last)]
    a, m, r, n, w0, w1, w2 = there
    shapes = {"gate": inner, "second linear": size, "sum": size, "linear after it": after}
    out = {name: torch.zeros(rows, columns, dtype=dtype, device=device) for name, columns in shapes.items()}

    def work() -> None:
        results = (
            ops.norm_gate_up(a, n, EPS, w0),
            ops.norm_linear(m, None, EPS, w1, None, r),
            *ops.linear_norm_linear(m, w1, None, r, n, EPS, w2),
        )
        for into, result in zip(out.values(), results, strict=True):
            into.copy_(result)

    run_op(platform, way, work, out.values())
    total = _product(middle.double(), *sums) + residual.double()
    gate = gated(_product(normed(x, norm), *gates))
    wanted = gate, total, total, normed(total, norm) @ last.double().T
    for (name, seen), values in zip(out.items(), wanted, strict=True):
        expect_magnitudes(seen, values, f"the {name} of {rows} rows")


@case(
    "kernels.few-rows-after-many",
    "Linears over few rows after some over many, in turns, are within rounding of float64 each time.",
    hazard="linears-in-tiles",
    cause="a counter or a workspace of the larger call that the smaller one finds",
)
def test_after_many(platform: Platform, seed: int) -> None:
    dtype, size, width, device = torch.bfloat16, 512, 256, platform.device
    x, norm = uneven_rows(300, size, dtype, seed), norm_weight(size, dtype, seed + 1)
    weight = random((2 * width, size), dtype, seed + 2, size**-0.5)
    square = random((size, size), dtype, seed + 3, size**-0.5)
    a, n, w, s = (t.to(device) for t in (x, norm, weight, square))
    product = normed(x, norm) @ weight.double().T
    total = x.double() @ square.double().T + x.double()
    for rows in (300, 3, 130, 1, 64, 2, 300, 17):
        part = a[:rows]
        expect_rows(ops.norm_linear(part, n, EPS, w), product[:rows], f"norm_linear of {rows} rows")
        expect_rows(ops.norm_gate_up(part, n, EPS, w), gated(product[:rows]), f"norm_gate_up of {rows} rows")
        sums, second = ops.linear_norm_linear(part, s, None, part, n, EPS, w)
        expect_rows(sums, total[:rows], f"sum of {rows} rows")
        expect_rows(second, normed(total[:rows], norm) @ weight.double().T, f"linear_norm_linear of {rows} rows")


@case(
    "kernels.sums-round-once",
    "Linears over 14,336 input columns in half precision are off by a rounding or two of the result, not by more.",
    hazard="linears-in-tiles",
    cause="parts of a sum that are added, or handed over, in half precision",
)
def test_sums(platform: Platform, seed: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (2, 40, 100):
            x, weight = random((rows, 14336), dtype, seed), random((64, 14336), dtype, seed + 1, 14336**-0.5)
            wanted = x.double() @ weight.double().T
            there = x.to(platform.device), weight.to(platform.device)
            seen = on_host(ops.norm_linear(there[0], None, EPS, there[1])).double()
            error, limit = float((seen - wanted).square().mean().sqrt()), torch.finfo(dtype).eps
            assert error < limit * float(wanted.square().mean().sqrt()), (
                f"{rows} rows in {dtype}: the root mean square of the error is {error:.2g}, more than "
                f"{limit:.2g} of the result's"
            )


def _repeated(columns: int, size: int, seed: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A bfloat16 weight [columns, size] of 256 random rows over and over, each time with other signs and powers of two
    per row, so that float64 multiplies 256 rows: the weight, and (those rows, the factors)."""
    base = random((256, size), torch.bfloat16, seed, size**-0.5)
    g = torch.Generator().manual_seed(seed)
    factors = torch.tensor([-2.0, -1.0, 1.0, 2.0])[torch.randint(0, 4, (columns // 256, 256), generator=g)]
    weight = (base.float() * factors[..., None]).to(torch.bfloat16)
    return weight.flatten(0, 1), (base, factors)


def _product(x: Tensor, base: Tensor, factors: Tensor) -> Tensor:
    """x @ weight.T in float64, of what `_repeated` made."""
    return ((x @ base.double().T)[:, None] * factors.double()).flatten(1)
