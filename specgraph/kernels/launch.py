"""Launches Triton kernels on one device, with its options, its overlap of kernels, and its choice of tiles."""

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
    """The tile of a linear."""

    columns: int = 32
    """Output columns per block."""
    depth: int = 128
    """Input columns per block."""
    warps: int = 4
    stages: int = 4
    """Stages of Triton's pipeline."""
    prefetch: int = 512
    """Input columns of the weights to prefetch before the wait for the kernel before. A power of two, at least 64."""


ChooseTile = Callable[[str, int, int, int], "Tile | None"]
"""(kind of linear, padded rows, output columns, input columns) -> tile. None if a library matmul is faster."""


@dataclass(frozen=True, slots=True)
class ManyRows:
    """A device's own linears for more rows than a tile takes: x [T, in] by a weight in the same dtype.

    Each function returns None if a library matmul is faster. It may read the weight before the previous kernel of the
    stream has ended, so the previous kernel must not write the weight.
    """

    takes: Callable[[Literal["GATED", "PARTS", "BEST"], Tensor, Tensor], bool]
    """(kind, x, weight) -> whether the function of that kind computes this linear."""
    gated: Callable[[Tensor, Tensor], Tensor | None]
    """(x, weight [2 * out, in]) -> silu(gate) * up with (gate | up) = x @ weight.T: [T, out]."""
    parts: Callable[[Tensor, Tensor], Tensor | None]
    """(x, weight [out, in]) -> float32 [S, T, out]. Its sum over the first dimension is x @ weight.T."""
    best: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor] | None]
    """See `FewRows.best`."""


TwoLinears = Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor, bool], "tuple[Tensor, Tensor] | None"]
"""A device's own `linear_norm_linear` for few rows, or `linear_norm_gate_up` if the last argument is True.

(x, weight, residual, norm, eps, next weight, gated) -> the op's results without biases. None if two kernels are as
fast. It may read the weights before the previous kernel of the stream has ended, so the previous kernel must not write
them.
"""


@dataclass(frozen=True, slots=True)
class FewRows:
    """A device's own linears for few rows: x [T, in] by a weight in the same dtype.

    Each function returns None if a tile is as fast. It may read the weight before the previous kernel of the stream has
    ended, so the previous kernel must not write the weight.
    """

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor | None]
    """(x, weight [out, in], residual [T, out] or None) -> x @ weight.T + residual."""
    best: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor] | None]
    """(x, weight [out, in], step, copy) -> (value, column). The columns of x @ weight.T, rounded to the dtype of x, are
    cut into parts. value, float32 [T, parts], is the largest of each row and part; column, int32 [T, parts], is its
    column, the first of equals. The value of `step`, int64 [1], is copied to `copy`."""


def default_tile(kind: str, rows: int, columns: int, depth: int) -> Tile | None:
    """Return the tile for a device without tuned ones: three stages in flight fit 99 KiB of shared memory."""
    if kind.endswith("_fp8"):
        return Tile(columns=64, depth=128, warps=4, stages=4)
    return Tile(columns=32 if rows <= 32 or kind == "gate_up" else 64, depth=128)  # gate_up reads twice the columns


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """The cut of one attention into programs."""

    rows: int
    """The number of pairs of a row and a query head of one KV head, per program. A power of two, at least 16."""
    keys: int
    """Keys per block; a power of two."""
    splits: int
    """Programs that share the context of one request, a power of two. If more than one, a second kernel adds them."""
    warps: int = 4
    stages: int = 2
    """Stages of Triton's pipeline. A block of keys takes two of them, since its addresses come from the block table,
    which is loaded ahead too. With 2 to 4 stages, a program loads the next block after it has attended to the one
    before. With 5 or 6 it does both at once, in the shared memory of two blocks of keys and values, with 7 of three."""
    span: int = 0
    """The least number of keys per split, a multiple of `keys`. A context of less than twice this number is not cut, so
    there is nothing to add. If block tables may hold long contexts, `splits` suits the longest, and most splits of
    short contexts stay empty."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes that the choice of an attention's tile depends on. None changes between replays of a graph."""

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
    """Return a tile that fits 100 KiB of shared memory."""
    most = 32 if shape.itemsize == 4 else 64
    rows = min(max(power_of_two(shape.rows), 16), most)
    # The keys and values of two blocks take at most 64 KiB.
    keys = max(16, min(most, (16 << 10) // (power_of_two(shape.head_dim) * shape.itemsize)))
    return AttentionTile(rows, keys, attention_splits(shape, rows, keys, 4 if rows <= 32 else 2))


def attention_splits(shape: AttentionShape, rows: int, keys: int, per_unit: int) -> int:
    """Return the number of splits per context: the largest power of two with at most `per_unit` programs per unit.

    Each split has at least `keys` keys. There are at most 64 splits, and more than 16 only if each has at least 512
    keys. A tile with many rows should have a smaller `per_unit`, since each split writes its rows once and a second
    kernel adds them.
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
    """A `@triton.jit` function (lines=None, START=True, WAIT=True) of the device that lets consecutive kernels overlap.
    None if they don't. With START it allows the next kernel of the stream to be scheduled. Then it prefetches the cache
    lines at the addresses `lines` (int64). With WAIT it returns when the kernel before has ended and its writes are
    visible. Each kernel calls it with START first of all: work before that call would delay the next kernel."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments to add to every launch."""
    tile: ChooseTile = default_tile
    many_rows: ManyRows | None = None
    two_linears: TwoLinears | None = None
    few_rows: FewRows | None = None
    attention: ChooseAttention = default_attention
    most_head_dim: int = 256
    """The largest head_dim that `attention` has tiles for. For caches without 2 bytes per element it is 256."""
    compute_units: int = 128
    """Multiprocessors of the device. The number of splits of attention depends on it."""
    float8: bool = False
    """True if kernels can convert float8_e4m3fn."""
    keep_compiled: bool = False
    """Launch kernels outside graphs in the compiled form that their first launch returned. Needs Triton 3.3."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """Base of the classes that implement ops with the kernels of one device. Subclasses add methods and no fields."""

    options: LaunchOptions
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict[tuple[Any, ...], Any], repr=False)
    """The compiled forms that first launches returned, keyed by kernel, device, constants and dtypes."""

    record: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None
    """Gets the kernel, arguments and options of each launch, and nothing is launched. None if kernels are launched."""
    said: set[str] = field(default_factory=set[str], repr=False)
    """Messages that `say_once` has logged."""

    def say_once(self, message: str) -> None:
        """Log a warning unless it was logged before."""
        if message not in self.said:
            self.said.add(message)
            _LOG.warning(message)

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
        """Launch `kernel` with the device's OVERLAP and extra options. Returns the compiled kernel.

        If `record` is set, it gets the launch: nothing is launched, and None is returned.
        """
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
        """Launch like `kernel[grid]`, but search the variant that fits only once: 7 us instead of 15.

        Args:
            kernel: takes the tensors, the integers (none specialised), then the constants and OVERLAP, in this order.
        """
        # Addresses, because the launch of a compiled kernel asks the driver about each tensor, but not about a number.
        addresses = [tensor.data_ptr() for tensor in tensors]
        # Triton compiles another variant for addresses that are not 16-byte aligned. It is launched in the usual way.
        if not self.options.keep_compiled or self.record is not None or reduce(or_, addresses) & 15:
            self.launch(kernel, grid, *tensors, *integers, **constants, num_warps=num_warps)
            return
        key = (kernel.__name__, tensors[0].device.index, *constants.values(), *[tensor.dtype for tensor in tensors])
        if (known := self.compiled.get(key)) is not None:
            known[grid](*addresses, *integers, *constants.values(), self.options.overlap)
            return
        self.compiled[key] = self.launch(kernel, grid, *tensors, *integers, **constants, num_warps=num_warps)


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. triton.cdiv takes microseconds outside a kernel, and a launch would need it often."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the least power of two from n on, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def tile_rows(count: int) -> int:
    """Return the rows of a tile for a linear of `count` rows: a power of two, at least a matrix instruction's 16."""
    return max(16, power_of_two(count))


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x if the elements of each row are contiguous. Otherwise return a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
