"""Launches of Triton kernels on one device: extra options, overlap with the kernel before, tile choices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, Literal

from torch import Tensor

_LOG = logging.getLogger("specgraph")


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of a linear: output columns and input columns per block, warps and pipeline stages."""

    columns: int = 32
    depth: int = 128
    warps: int = 4
    stages: int = 4
    prefetch: int = 512
    """Input columns of the weights to prefetch before waiting for the kernel before; a power of two, at least 64."""


ChooseTile = Callable[[str, int, int, int], "Tile | None"]
"""(kind of linear, padded rows, output columns, input columns) -> tile; None where a library matmul is faster."""


@dataclass(frozen=True, slots=True)
class ManyRows:
    """A device's own linears of more rows than a tile takes, x [T, in] by a weight in the same dtype.

    Each returns None where a library matmul is faster. It may read the weight before the kernel launched before it has
    ended, so that one must not write it.
    """

    takes: Callable[[Literal["GATED", "PARTS", "BEST"], Tensor, Tensor], bool]
    """(kind, x, weight) -> whether the function of that kind computes it."""
    gated: Callable[[Tensor, Tensor], Tensor | None]
    """(x, weight [2 * out, in]) -> silu(gate) * up of (gate | up) = x @ weight.T: [T, out]."""
    parts: Callable[[Tensor, Tensor], Tensor | None]
    """(x, weight [out, in]) -> float32 [S, T, out], whose sum over the first dimension is x @ weight.T."""
    best: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor] | None]
    """See `FewRows.best`."""


TwoLinears = Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor, bool], "tuple[Tensor, Tensor] | None"]
"""A device's own `linear_norm_linear` or, if the last argument is True, `linear_norm_gate_up`, of few rows.

(x, weight, residual, norm, eps, next weight, gated) -> what the op returns without biases, or None where two kernels
are as fast. It may read the weights before the kernel launched before it has ended, so that one must not write them.
"""


@dataclass(frozen=True, slots=True)
class FewRows:
    """A device's own linears of few rows, x [T, in] by a weight in the same dtype.

    Each returns None where a tile is as fast. It may read the weight before the kernel launched before it has ended, so
    that one must not write it.
    """

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor | None]
    """(x, weight [out, in], residual [T, out]) -> x @ weight.T, plus residual where there is one."""
    best: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor] | None]
    """(x, weight [out, in], step, copy) -> per part of the columns of x @ weight.T, rounded to the dtype of x, the
    largest of each row, float32 [T, parts], and its column, int32 [T, parts], the first of equals. The value of `step`,
    int64 [1], is copied to `copy`."""


def default_tile(kind: str, rows: int, columns: int, depth: int) -> Tile | None:
    """Tiles for a device that nobody tuned for: three stages in flight fit 99 KiB of shared memory."""
    if kind.endswith("_fp8"):
        return Tile(columns=64, depth=128, warps=4, stages=4)
    return Tile(columns=32 if rows <= 32 or kind == "gate_up" else 64, depth=128)  # gate_up reads twice as many


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """The cut of one attention into programs."""

    rows: int
    """Rows times query heads of a KV head, per program; a power of two, at least 16."""
    keys: int
    """Keys per block; a power of two."""
    splits: int
    """Programs that share the context of one request, a power of two. A second kernel adds them if more than one."""
    warps: int = 4
    stages: int = 2
    """Stages of Triton's pipeline. Keys take two each, since their addresses come from the block table, which is loaded
    ahead too: with 2 to 4, a program loads the next keys once it has attended to those before; with 5 or 6 while it
    does, in the shared memory of two blocks of keys and values; with 7, three."""
    span: int = 0
    """The least keys per split, a multiple of `keys`: a context of less than twice as many is not cut, and nothing is
    left to add. Where block tables may hold long contexts, splits for the longest leave empty ones to the short."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes that the choice of an attention's tile depends on: nothing that changes between replays of a graph."""

    rows: int
    """Rows of one request times the query heads of one KV head."""
    pairs: int
    """Requests times KV heads."""
    context: int
    """The longest context that the block table holds."""
    head_dim: int
    itemsize: int
    """Bytes per element of the query."""
    cache_itemsize: int
    """Bytes per element of keys and values in the cache."""
    compute_units: int


ChooseAttention = Callable[[AttentionShape], AttentionTile]


def default_attention(shape: AttentionShape) -> AttentionTile:
    """Tiles that fit 100 KiB of shared memory."""
    most = 32 if shape.itemsize == 4 else 64
    rows = min(max(power_of_two(shape.rows), 16), most)
    # Keys and values of two blocks take 64 KiB at most.
    keys = max(16, min(most, (16 << 10) // (power_of_two(shape.head_dim) * shape.itemsize)))
    return AttentionTile(rows, keys, attention_splits(shape, rows, keys, 4 if rows <= 32 else 2))


def attention_splits(shape: AttentionShape, rows: int, keys: int, per_unit: int) -> int:
    """Return splits of the context: as many as give up to `per_unit` programs per compute unit, each of `keys` keys or
    more.

    Fewer programs per unit where a tile has many rows, since each split writes its rows once and a second kernel adds
    them. At most 64, and above 16 only where each has 512 keys or more.
    """
    programs, splits = shape.pairs * ceil_div(shape.rows, rows), 1
    while splits < 64 and programs * splits * 2 <= per_unit * shape.compute_units:
        if shape.context < 2 * splits * (keys if splits < 16 else 512):
            break
        splits *= 2
    return splits


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The options that a device adds to every launch of these kernels."""

    overlap: Any = None
    """A `@triton.jit` function (lines=None, START=True, WAIT=True) of the device that lets consecutive kernels overlap,
    or None. With START it allows the next kernel of the stream to be scheduled; it prefetches the cache lines at the
    addresses `lines` (int64); with WAIT it returns once the kernel before has ended and its writes are visible. Each
    kernel calls it with START before anything else: what comes before delays the next kernel."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of every launch."""
    tile: ChooseTile = default_tile
    many_rows: ManyRows | None = None
    two_linears: TwoLinears | None = None
    few_rows: FewRows | None = None
    attention: ChooseAttention = default_attention
    most_head_dim: int = 256
    """Elements of the widest heads that `attention` has tiles for, those above 256 in caches of 2 bytes per element."""
    compute_units: int = 128
    """Multiprocessors of the device: how far to split attention."""
    float8: bool = False
    """True if kernels can convert float8_e4m3fn."""
    keep_compiled: bool = False
    """Launch kernels outside graphs through the compiled kernel that the first launch returned. Needs Triton 3.3."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """Base of the classes whose methods implement the ops of one device. They add methods and no fields."""

    options: LaunchOptions
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict[tuple[Any, ...], Any], repr=False)
    """Compiled kernels as their first launch returned them, keyed by device, constants and dtypes."""

    record: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None
    """Takes the kernel, arguments and options of each launch, which is not done then; None: launches are done."""
    said: set[str] = field(default_factory=set[str], repr=False)
    """Messages that `say_once` has logged."""

    def say_once(self, message: str) -> None:
        """Log a warning, the first time that it is given."""
        if message not in self.said:
            self.said.add(message)
            _LOG.warning(message)

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
        """Launch a kernel, whose parameter OVERLAP is set here, and return its compiled form. Where `record` is set,
        it takes the launch, nothing is launched, and None is returned."""
        options |= {"OVERLAP": self.options.overlap, **self.options.extra}
        if self.record is None:
            return kernel[grid](*arguments, **options)
        self.record(kernel, arguments, options)

    def launch_again(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        integers: tuple[int, ...],
        constants: dict[str, Any],
        num_warps: int,
    ) -> None:
        """Launch as `kernel[grid]` does, without its search for the variant that fits: 7 us instead of 15.

        Args:
            kernel: takes the tensors, the integers (none specialised), then the constants and OVERLAP, in this order.
        """
        # Addresses, because the launch of a compiled kernel asks the driver about each tensor, not about a number.
        addresses = [tensor.data_ptr() for tensor in tensors]
        # Triton compiles a variant for pointers that are not 16-byte aligned: those are launched in the usual way.
        if not self.options.keep_compiled or self.record is not None or reduce(or_, addresses) & 15:
            self.launch(kernel, grid, *tensors, *integers, **constants, num_warps=num_warps)
            return
        key = (kernel.__name__, tensors[0].device.index, *constants.values(), *[tensor.dtype for tensor in tensors])
        if (known := self.compiled.get(key)) is not None:
            known[grid](*addresses, *integers, *constants.values(), self.options.overlap)
            return
        self.compiled[key] = self.launch(kernel, grid, *tensors, *integers, **constants, num_warps=num_warps)


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. triton.cdiv takes microseconds outside a kernel, and a launch needs several."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the least power of two that is not less than n, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def tile_rows(count: int) -> int:
    """Rows of the tile of a linear of `count` rows: a power of two, at least the 16 that a matrix instruction takes."""
    return max(16, power_of_two(count))


def contiguous_rows(x: Tensor) -> Tensor:
    """x itself if the elements of each row are contiguous, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
