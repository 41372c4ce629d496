"""Rows of the linears, against float64: norms, biases, residuals, gates, FP8 weights, and two linears in one op."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from specgraph import ops
from specgraph.ops import Norm, PairInput, Weight
from specgraph.ops.linear import FP8
from specgraph_models import ops as model_ops
from torch import Generator, Tensor

from specgraph_conformance.linear_oracles import EPS, expect_magnitudes, gated, norm_of, normal, normed, uneven
from specgraph_conformance.op_table import FLOATS, HALVES, Run, Table, expect_reference

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


def make(
    g: Generator, rows: int, columns: int, dtype: torch.dtype, bias: bool = True, groups: int = 0, gain: float = 1.0
) -> Weight:
    """Make a weight [rows, columns].

    Args:
        groups: the groups of columns with a scale each, in FP8. 0 for a matrix in `dtype`.
        gain: the magnitude of the products with inputs of magnitude 1.
    """
    added = normal(g, (rows,), dtype, gain) if bias else None
    if not groups:
        return Weight(normal(g, (rows, columns), dtype, gain * columns**-0.5), added)
    values = normal(g, (rows, columns), torch.float32, 60.0).to(FP8)
    return Weight(values, added, (0.5 + torch.rand(groups, rows, generator=g)) * gain / (60 * columns**0.5))


def expect_linear(run: Run, op: Any, *given: Any) -> None:
    """Check an op of linears. Errors in small rows count as much as errors in large rows."""
    expect_reference(run, op, *given, compare=expect_magnitudes)


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
    norm, halves = Norm(norm_of(g, size, dtype), EPS), [norm_of(g, half, dtype) for _ in range(2)]
    plain, gate_up = (make(g, n, size, dtype, True, groups) for n in (width, 2 * inner))
    for normalised, bias, added in choices if "plain" in parts else ():
        weight = plain if bias else plain._replace(bias=None)
        expect_linear(run, ops.norm_linear, x, norm if normalised else None, weight, residual if added else None)
    for normalised, bias in [(True, True), (True, False), (False, True)] if "gated" in parts else ():
        weight = gate_up if bias else gate_up._replace(bias=None)
        expect_linear(run, model_ops.norm_gate_up, x, norm if normalised else None, weight)
    table, ids = normal(g, (50, half), dtype), torch.arange(rows) * 7 % 50
    for first, second in PAIRS if "pair" in parts else ():
        pair = PairInput(table, halves[0] if first else None, halves[1] if second else None, EPS)
        expect_linear(run, model_ops.pair_linear, ids, hidden, pair, plain)
    for bias in (True, False) if "two" in parts else ():  # with the residual sum and the norm between them
        first_linear = make(g, size, size, dtype, bias, groups, gain=0.4)
        before = normal(g, (rows, size), dtype), first_linear, uneven(g, rows, size, dtype), norm
        expect_linear(run, model_ops.linear_norm_linear, *before, make(g, width, size, dtype, bias, groups))
        expect_linear(run, model_ops.linear_norm_gate_up, *before, make(g, 2 * inner, size, dtype, bias, groups))


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
        expect_linear(run, ops.norm_linear, x, Norm(norm, EPS), make(g, columns, size, dtype, bias=False))
    expect_linear(run, model_ops.norm_gate_up, x, Norm(norm, EPS), make(g, 2 * 14000, size, dtype, bias=False))


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
    product = normed(total, norm) @ last.matrix.double().T
    gate = run(model_ops.norm_gate_up, x, Norm(norm, EPS), gate_up.weight)
    expect_magnitudes(gate, gated(gate_up.product(normed(x, norm))), "the gate")
    expect_magnitudes(run(ops.norm_linear, middle, None, down.weight, residual), total, "the second linear")
    seen = run(model_ops.linear_norm_linear, middle, down.weight, residual, Norm(norm, EPS), last)
    for values, wanted, name in zip(seen, (total, product), ("sum", "linear"), strict=True):
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
    for rows in (300, 3, 130, 1, 64, 2, 300, 17):
        part, scale = x[:rows], Norm(norm, EPS)
        expect_linear(run, ops.norm_linear, part, scale, made)
        expect_linear(run, model_ops.norm_gate_up, part, scale, made)
        expect_linear(run, model_ops.linear_norm_linear, part, square, part, scale, made)


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
    wanted = x.double() @ made.matrix.double().T
    error = float((run(ops.norm_linear, x, None, made).double() - wanted).square().mean().sqrt())
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
    pair = PairInput(table, None, None, EPS)
    expect_reference(run, model_ops.pair_linear, ids, hidden, pair, made, tolerance=1e-3)
