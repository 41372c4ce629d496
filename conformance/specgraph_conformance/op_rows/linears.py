"""Rows of the linears, against float64: norms, biases, residuals, gates, FP8 weights, and two linears in one op."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from specgraph import ops
from specgraph.ops import Norm, PairInput, Weight
from specgraph.ops.linear import FP8
from specgraph_models import ops as model_ops
from torch import Generator, Tensor

from specgraph_conformance.linear_oracles import EPS, expect_magnitudes, gated, norm_of, normal, normed, uneven
from specgraph_conformance.op_table import FLOATS, HALVES, Run, Table
from specgraph_conformance.rig import expect_close

TABLE = Table()


class Sizes(NamedTuple):
    """The columns of one table row's linears: of their input, and of plain and gated outputs."""

    size: int = 64
    width: int = 80
    inner: int = 24


class Parts(NamedTuple):
    """The parts that a linear has besides its matrix."""

    norm: bool
    bias: bool
    residual: bool


ALL_PARTS = [Parts(*chosen) for chosen in product((False, True), repeat=3)]
SOME_PARTS = [Parts(norm=True, bias=False, residual=False), Parts(norm=False, bias=True, residual=True)]
PAIRS = list(product((False, True), repeat=2))
"""(the embedding is normalised, the hidden state is normalised)."""


class Made(NamedTuple):
    """A weight, and the same matrix in float64 with its scales multiplied out."""

    weight: Weight
    wide: Tensor

    def product(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias in float64."""
        bias = self.weight.bias
        return x.double() @ self.wide.T + (0 if bias is None else bias.double())


def make(
    g: Generator, rows: int, columns: int, dtype: torch.dtype, bias: bool = True, groups: int = 0, gain: float = 1.0
) -> Made:
    """Make a weight [rows, columns].

    Args:
        groups: the groups of columns with a scale each, in FP8. 0 for a matrix in `dtype`.
        gain: the magnitude of the products with inputs of magnitude 1.
    """
    added = normal(g, (rows,), dtype, gain) if bias else None
    if not groups:
        matrix = normal(g, (rows, columns), dtype, gain * columns**-0.5)
        return Made(Weight(matrix, added), matrix.double())
    values = normal(g, (rows, columns), torch.float32, 60.0).to(FP8)
    scale = (0.5 + torch.rand(groups, rows, generator=g)) * gain / (60 * columns**0.5)
    wide = values.double().view(rows, groups, -1) * scale.double().t()[:, :, None]
    return Made(Weight(values, added, scale), wide.flatten(1))


def check_linears(
    run: Run,
    g: Generator,
    dtype: torch.dtype,
    rows: int,
    sizes: Sizes,
    choices: list[Parts] = ALL_PARTS,
    groups: int = 0,
    parts: tuple[str, ...] = ("plain", "gated", "pair", "two"),
) -> None:
    """Check linears over rows of three magnitudes. The eps is as large as the mean square of the smallest rows."""
    (size, width, inner), half = sizes, sizes.size // 2
    x, hidden, residual = (uneven(g, rows, n, dtype) for n in (size, half, width))
    norm, halves = norm_of(g, size, dtype), [norm_of(g, half, dtype) for _ in range(2)]
    plain, gate_up = (make(g, n, size, dtype, True, groups) for n in (width, 2 * inner))
    what = f"over {groups} scales per row" if groups else ""
    if "plain" in parts:
        for normalised, bias, added in choices:
            used = plain if bias else Made(plain.weight._replace(bias=None), plain.wide)
            given = x, Norm(norm, EPS) if normalised else None, used.weight, residual if added else None
            wanted = used.product(normed(x, norm if normalised else None)) + (residual.double() if added else 0)
            expect_magnitudes(
                run(ops.norm_linear, *given), wanted, f"norm_linear {Parts(normalised, bias, added)} {what}"
            )
    if "gated" in parts:
        for normalised, bias in [(True, True), (True, False), (False, True)]:
            used = gate_up if bias else Made(gate_up.weight._replace(bias=None), gate_up.wide)
            seen = run(model_ops.norm_gate_up, x, Norm(norm, EPS) if normalised else None, used.weight)
            wanted = gated(used.product(normed(x, norm if normalised else None)))
            expect_magnitudes(seen, wanted, f"norm_gate_up with{'' if bias else 'out'} bias {what}")
    if "pair" in parts:
        table, ids = normal(g, (50, half), dtype), torch.arange(rows) * 7 % 50
        for first, second in PAIRS:
            pair = PairInput(table, halves[0] if first else None, halves[1] if second else None, EPS)
            both = torch.cat((normed(table[ids], pair.table_norm), normed(hidden, pair.hidden_norm)), dim=-1)
            seen = run(model_ops.pair_linear, ids, hidden, pair, plain.weight)
            expect_magnitudes(seen, plain.product(both), f"pair_linear {(first, second)} {what}")
    if "two" in parts:
        check_two(run, g, dtype, rows, sizes, groups)


def check_two(run: Run, g: Generator, dtype: torch.dtype, rows: int, sizes: Sizes, groups: int = 0) -> None:
    """Check two linears with the residual sum and the norm between them, with and without biases."""
    size, width, inner = sizes
    x, residual, norm = normal(g, (rows, size), dtype), uneven(g, rows, size, dtype), norm_of(g, size, dtype)
    for bias in (True, False):
        first = make(g, size, size, dtype, bias, groups, gain=0.4)
        following, gate_up = (make(g, n, size, dtype, bias, groups) for n in (width, 2 * inner))
        total = first.product(x) + residual.double()
        before = x, first.weight, residual, Norm(norm, EPS)
        seen = (
            *run(model_ops.linear_norm_linear, *before, following.weight),
            *run(model_ops.linear_norm_gate_up, *before, gate_up.weight),
        )
        products = following.product(normed(total, norm)), gated(gate_up.product(normed(total, norm)))
        wanted = total, products[0], total, products[1]
        names = "sum", "second product", "sum before the gate", "gated product"
        for values, expected, name in zip(seen, wanted, names, strict=True):
            expect_magnitudes(values, expected, f"{name} with{'' if bias else 'out'} biases")


@TABLE.row(
    "linears",
    "Linears with every choice of norm, bias and residual, gated, of an embedding and a hidden state, and two with a "
    "norm between them, are within rounding of float64 in rows of every magnitude.",
    hazard="fused-linears",
    cause="a fused op: gate and up, or embedding and hidden state exchanged; a norm, a bias or the residual left out; "
    "or sums in the narrow type",
    dtype={**FLOATS, "fp16": torch.float16},
    rows=[1, 4, 17],
)
@TABLE.row(
    "linears-of-many-rows",
    "The same over 133 rows, more than a tile and no multiple of one.",
    hazard="linears-of-many-rows",
    cause="an eps that is baked in, a bias that is lost where there is a residual, or rows past a tile",
    dtype=FLOATS,
    rows=[133],
)
def linears(run: Run, g: Generator, dtype: torch.dtype, rows: int) -> None:
    check_linears(run, g, dtype, rows, Sizes(112 if rows > 100 else 64))  # 112 is no multiple of a tile's columns


@TABLE.row(
    "linears-in-tiles",
    "Linears of 384 and of 512 input columns in half precision, with and without norm, bias and residual, are within "
    "rounding of float64.",
    hazard="linears-in-tiles",
    cause="a kernel for half precision and few rows: rows or columns past a tile, a bias or residual of another tile, "
    "an eps that is baked in, or squares of a part of the columns",
    large=True,
    dtype=HALVES,
    size=[384, 512],
    rows=[1, 24, 64],
)
def linears_in_tiles(run: Run, g: Generator, dtype: torch.dtype, size: int, rows: int) -> None:
    check_linears(run, g, dtype, rows, Sizes(size, 200, 130), SOME_PARTS)


@TABLE.row(
    "linears-fp8",
    "Linears over FP8 weights are within rounding of float64's products with the dequantised weights, with a scale per "
    "row and with scales per row and block of columns.",
    hazard="quantised-drafter-in-graphs",
    cause="a scale of another row or block, e4m3 read as another format, the scale left out, or scales and workspaces "
    "of the capture in a graph",
    needs=("float8",),
    dtype=FLOATS,
    groups=[1, 3],
)
def linears_fp8(run: Run, g: Generator, dtype: torch.dtype, groups: int) -> None:
    check_linears(run, g, dtype, 9, Sizes(384, 160, 80), groups=groups)


@TABLE.row(
    "linears-fp8-in-tiles",
    "Linears of 512 input columns over FP8 weights, with scales for all columns of a row or for each 256, 128 or 64 of "
    "them, are within rounding of float64's products with the dequantised weights.",
    hazard="linears-in-tiles",
    cause="a scale of another row or block of columns, a tile that is wider than a block, or rows past a tile",
    needs=("float8",),
    large=True,
    dtype=HALVES,
    rows=[1, 24, 70],
)
def linears_fp8_in_tiles(run: Run, g: Generator, dtype: torch.dtype, rows: int) -> None:
    every = [Parts(norm=True, bias=True, residual=True)]
    for groups in (1, 2, 4, 8):
        check_linears(run, g, dtype, rows, Sizes(512, 328, 164), every, groups, ("plain", "gated"))


@TABLE.row(
    "linears-of-many-columns",
    "Linears of up to 9,000 output columns, and gated ones of 14,000, are within rounding of float64.",
    hazard="linears-in-tiles",
    cause="the tile that is chosen for so many columns: its last columns, or a gate of other columns",
    large=True,
    rows=[10, 60],
)
def linears_of_many_columns(run: Run, g: Generator, rows: int) -> None:
    dtype, size = torch.bfloat16, 512
    x, norm = uneven(g, rows, size, dtype), norm_of(g, size, dtype)
    for columns in (3000, 9000):
        made = make(g, columns, size, dtype, bias=False)
        seen = run(ops.norm_linear, x, Norm(norm, EPS), made.weight)
        expect_magnitudes(seen, made.product(normed(x, norm)), f"a linear of {columns} columns")
    made = make(g, 2 * 14000, size, dtype, bias=False)
    seen = run(model_ops.norm_gate_up, x, Norm(norm, EPS), made.weight)
    expect_magnitudes(seen, gated(made.product(normed(x, norm))), "a gated linear of 14,000 columns")


MLPS = [(12288, 2048, 70), (9728, 2048, 40), (17408, 1024, 5)]
"""(columns of the gate, columns of the residual, rows)."""


@TABLE.row(
    "mlp-of-many-requests",
    "The MLPs of models of several sizes over 5 to 70 rows of bfloat16, the gate, the second linear with the "
    "residual, and that linear with the norm and the linear after it, are within rounding of float64.",
    hazard="linears-in-tiles",
    cause="a kernel for wide or deep linears or for more rows than a tile: blocks of rows or columns past the last "
    "one, sums of parts, or rows of a tile that are not there",
    large=True,
    mlp={f"{inner}-{size}-{rows}": (inner, size, rows) for inner, size, rows in MLPS},
)
def mlp_of_many_requests(run: Run, g: Generator, mlp: tuple[int, int, int]) -> None:
    (inner, size, rows), dtype = mlp, torch.bfloat16
    gate_up, down, last = Repeated(g, 2 * inner, size), Repeated(g, size, inner), make(g, 96, size, dtype, bias=False)
    x, middle = uneven(g, rows, size, dtype), uneven(g, rows, inner, dtype)
    residual, norm = uneven(g, rows, size, dtype), norm_of(g, size, dtype)
    total = down.product(middle) + residual.double()
    gate = run(model_ops.norm_gate_up, x, Norm(norm, EPS), gate_up.weight)
    expect_magnitudes(gate, gated(gate_up.product(normed(x, norm))), "the gate")
    expect_magnitudes(run(ops.norm_linear, middle, None, down.weight, residual), total, "the second linear")
    seen = run(model_ops.linear_norm_linear, middle, down.weight, residual, Norm(norm, EPS), last.weight)
    for values, wanted, name in zip(seen, (total, last.product(normed(total, norm))), ("sum", "linear"), strict=True):
        expect_magnitudes(values, wanted, f"the {name} after it")


class Repeated:
    """A bfloat16 weight [columns, size] that repeats 256 random rows, each time with other signs and powers of two.

    The float64 product therefore needs 256 rows only.
    """

    def __init__(self, g: Generator, columns: int, size: int) -> None:
        self.base = normal(g, (256, size), torch.bfloat16, size**-0.5)
        self.factors = torch.tensor([-2.0, -1.0, 1.0, 2.0])[torch.randint(0, 4, (columns // 256, 256), generator=g)]
        self.weight = Weight((self.base * self.factors.to(torch.bfloat16)[..., None]).flatten(0, 1))

    def product(self, x: Tensor) -> Tensor:
        """Return x @ weight.T in float64."""
        return ((x.double() @ self.base.double().T)[:, None] * self.factors.double()).flatten(1)


@TABLE.row(
    "few-rows-after-many",
    "Linears over few rows after some over many, in turns, are within rounding of float64 each time.",
    hazard="linears-in-tiles",
    cause="a counter or a workspace of the larger call that the smaller one finds",
    large=True,
)
def few_rows_after_many(run: Run, g: Generator) -> None:
    dtype, size = torch.bfloat16, 512
    x, norm = uneven(g, 300, size, dtype), norm_of(g, size, dtype)
    made, square = (make(g, size, size, dtype, bias=False) for _ in range(2))
    wide = made.product(normed(x, norm))
    total = square.product(x) + x.double()
    for rows in (300, 3, 130, 1, 64, 2, 300, 17):
        part, scale = x[:rows], Norm(norm, EPS)
        seen = run(ops.norm_linear, part, scale, made.weight), run(model_ops.norm_gate_up, part, scale, made.weight)
        both = run(model_ops.linear_norm_linear, part, square.weight, part, scale, made.weight)
        wanted = wide, gated(wide), total, made.product(normed(total, norm))
        for values, expected in zip((*seen, *both), wanted, strict=True):
            expect_magnitudes(values, expected[:rows], f"a linear of {rows} rows")


@TABLE.row(
    "sums-round-once",
    "Linears over 14,336 input columns in half precision are off by a rounding or two of the result, not by more.",
    hazard="linears-in-tiles",
    cause="parts of a sum that are added, or handed over, in half precision",
    large=True,
    dtype=HALVES,
    rows=[2, 40, 200],
)
def sums_round_once(run: Run, g: Generator, dtype: torch.dtype, rows: int) -> None:
    x, made = normal(g, (rows, 14336), dtype), make(g, 64, 14336, dtype, bias=False)
    wanted = made.product(x)
    error = float((run(ops.norm_linear, x, None, made.weight).double() - wanted).square().mean().sqrt())
    limit = torch.finfo(dtype).eps * float(wanted.square().mean().sqrt())
    assert error < limit, f"the root mean square of the error is {error:.2g} instead of at most {limit:.2g}"


@TABLE.row(
    "embedding-of-a-large-vocabulary",
    "The fused embedding is exact for token ids above 65,535.",
    hazard="large-vocabulary",
    cause="pair_linear: a token id in 16 bits",
)
def embedding_of_a_large_vocabulary(run: Run, g: Generator) -> None:
    ids, table, hidden = torch.tensor([69_999, 66_000, 65_535]), normal(g, (70_000, 32)), normal(g, (3, 32))
    made = make(g, 16, 64, torch.float32)
    seen = run(model_ops.pair_linear, ids, hidden, PairInput(table, None, None, EPS), made.weight)
    expect_close(seen, made.product(torch.cat((table[ids], hidden), dim=-1)), 1e-3, "pair_linear")
