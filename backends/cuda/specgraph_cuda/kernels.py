# type: ignore  (Triton compiles it; no type checker can read it)
"""The draft ops of this device: the shared Triton kernels, with this GPU's tiles and launch options."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl

from specgraph.kernels.ahead import compilations
from specgraph.kernels.compilation import compile_all
from specgraph.kernels.implement import launchers_of, register
from specgraph.kernels.launch import (
    AttentionShape,
    AttentionTile,
    LaunchOptions,
    Tile,
    attention_splits,
    ceil_div,
    default_attention,
    default_tile,
)
from specgraph.ops.library import Op
from specgraph_cuda.many_rows_plan import BLOCKS

_log = logging.getLogger(__name__)

_MULTIPROCESSORS = 132
"""The multiprocessors of an H200, on which the tiles were tuned."""
_ENOUGH_PROGRAMS = 104
"""Programs that keep about four fifths of them busy."""

# Tiles by the rows of a linear, tuned on an H200 (see benchmarks/LESSONS.md). A linear with few output columns needs
# narrow tiles, so that every multiprocessor streams weights. Also measured there:
# - A norm inside a linear's loop costs 4 to 30 us. As a kernel of its own it costs 2 us.
# - With 24 rows of 14336 columns, a mask on the rows makes it 45 us instead of 33 us.
# - FP8 linears of 2 to 32 rows are faster without that mask.
_NARROW = {16: Tile(32, 256, 2, 6, 512), 32: Tile(32, 256, 2, 5, 512), 64: Tile(32, 128, 4, 6, 256)}
_MEDIUM = {16: Tile(16, 512, 2, 3, 512), 32: Tile(16, 256, 2, 4, 512)}
_GATE_UP = {16: Tile(128, 128, 4, 3, 64), 32: Tile(128, 128, 4, 3, 64), 64: Tile(128, 64, 4, 4, 64)}
_HEAD = {16: Tile(128, 128, 4, 4, 64), 32: Tile(128, 128, 4, 3, 64), 64: Tile(128, 128, 4, 4, 64)}

# For the output projection of heads that draw their tokens in order (DSpark, Domino). On an H100 no other of 14 tiles
# was faster with 1, 8 and 32 requests. With narrower tiles a sampled draw has more parts to add.
_HEAD_256 = {16: Tile(128, 256, 4, 2, 64), 32: Tile(128, 128, 4, 2, 64), 64: Tile(128, 128, 4, 2, 64)}

# Narrower tiles, for linears that the tiles above cut into fewer programs than there are multiprocessors, as with a
# hidden size of 2048.
_FEW_COLUMNS = {16: Tile(16, 512, 2, 4, 512), 64: Tile(16, 128, 4, 6, 256)}
_GATE_UP_FEW_COLUMNS = {16: Tile(64, 256, 4, 3, 64), 64: Tile(64, 64, 4, 5, 64)}

# For gated linears that `_GATE_UP` cuts into fewer programs than four fifths of the multiprocessors.
_GATE_UP_12288 = {16: Tile(32, 128, 4, 4, 256)}

# (rows of a tile, output columns, input columns) of the one shape of `_MEDIUM` that cuBLAS runs, as it was faster:
# the qkv linear of an EAGLE-3 head for an 8B target, at 17 to 32 rows. Shapes near it were not timed.
_FASTER_IN_CUBLAS = (32, 6144, 8192)

_LINEAR_FP8 = {16: Tile(32, 512, 4, 5, 512), 32: Tile(32, 256, 4, 5, 256), 64: Tile(32, 256, 4, 5, 512)}
_WIDE_FP8 = {16: Tile(32, 512, 2, 4, 512), 32: Tile(32, 256, 4, 5, 256), 64: Tile(64, 128, 4, 7, 256)}
_GATE_UP_FP8 = {16: Tile(64, 256, 4, 3, 64), 32: Tile(64, 128, 8, 5, 256), 64: Tile(128, 128, 8, 4, 64)}


def tile_for(kind: str, rows: int, columns: int, depth: int) -> Tile | None:
    """Return the tile of one linear; see `specgraph.kernels.launch.ChooseTile`."""
    if kind == "head" and depth == 256:
        return _HEAD_256[rows]
    if depth % 512:
        return default_tile(kind, rows, columns, depth)
    if kind == "gate_up_fp8":
        return _GATE_UP_FP8[rows]
    if kind == "linear_fp8":
        return (_LINEAR_FP8 if columns <= 32 * _MULTIPROCESSORS else _WIDE_FP8)[rows]
    if kind == "gate_up":
        if columns <= 64 * _MULTIPROCESSORS:
            return _GATE_UP_FEW_COLUMNS.get(rows, _GATE_UP[rows])
        narrower = _GATE_UP_12288 if columns < 128 * _ENOUGH_PROGRAMS else {}
        return narrower.get(rows, _GATE_UP[rows])
    if kind == "head":
        return _HEAD[rows]
    if columns <= 16 * _MULTIPROCESSORS and rows in _FEW_COLUMNS:
        return _FEW_COLUMNS[rows]
    if columns <= 32 * _MULTIPROCESSORS:
        return _NARROW[rows]
    if columns <= 64 * _MULTIPROCESSORS:
        return None if (rows, columns, depth) == _FASTER_IN_CUBLAS else _MEDIUM.get(rows)
    return _GATE_UP[rows]


def attention_for(shape: AttentionShape) -> AttentionTile:
    """Return the tile of one attention call on multiprocessors with 227 KiB of shared memory.

    The tiles were measured: see benchmarks/LESSONS.md.
    """
    if shape.head_dim > 256:  # latents: the fastest tile that fits, on an H100 at 131,072 keys
        if shape.rows <= 16:
            return AttentionTile(16, 16, attention_splits(shape, 16, 16, per_unit=2))
        return AttentionTile(32, 32, attention_splits(shape, 32, 32, per_unit=1), warps=8)
    if shape.itemsize != 2 or shape.head_dim > 128:
        return default_attention(shape)
    if shape.cache_itemsize == 1:
        return _attention_over_fp8(shape)
    usual = default_attention(shape)
    if shape.rows <= 16:  # a draft step
        if shape.pairs > 16:
            return replace(usual, stages=5) if usual.splits == 1 and _between_waves(shape) else usual
        return AttentionTile(rows=16, keys=128, splits=attention_splits(shape, 16, 128, per_unit=1), stages=5)
    if shape.rows > 32:  # prompts, draft trees, blocks of a parallel drafter
        return usual if usual.splits > 8 else replace(usual, stages=5)
    # The rows of a verify. Few programs get a multiprocessor each and read 128 keys at a time. Of many programs, two
    # share a multiprocessor.
    few = shape.pairs <= shape.compute_units
    tile = AttentionTile(
        rows=32, keys=128 if few else 64, splits=attention_splits(shape, 32, 128, per_unit=1), stages=5
    )
    span = 512 if tile.splits > 1 else 1024
    if tile.splits > 4 or shape.context < 4 * span:
        return tile
    return replace(tile, splits=4, span=span)  # one program alone would take too long over the longest context


def _between_waves(shape: AttentionShape) -> bool:
    """Return whether a draft step's programs fill their last wave better with two per multiprocessor than with four.

    Two per multiprocessor load the next keys ahead. If both ways fill the last wave, they take the same time on an
    H200.
    """
    if shape.head_dim <= 64:  # not measured: more than four such programs fit in shared memory
        return False
    four, two = (ceil_div(shape.pairs, count) * count for count in (4 * shape.compute_units, 2 * shape.compute_units))
    return two < four


def _attention_over_fp8(shape: AttentionShape) -> AttentionTile:
    """Return the tile of one attention call over an e4m3 cache. Converting its keys takes longer than reading them."""
    if not 16 < shape.rows <= 32:
        return default_attention(shape)
    return AttentionTile(rows=32, keys=128, splits=attention_splits(shape, 32, 128, per_unit=2), stages=3)


@triton.jit
def overlap_previous(lines=None, START: tl.constexpr = True, WAIT: tl.constexpr = True):
    """Programmatic dependent launch: see `specgraph.kernels.launch.LaunchOptions.overlap`.

    PTX's griddepcontrol needs compute capability 9.0, and a kernel that is launched with `launch_pdl`.
    """
    if START:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    if lines is not None:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )
    if WAIT:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def on_its_device(op: Op[Any, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, run with the device of its first tensor as the current one: Triton launches on the current
    device."""
    in_record = op.parameters.all[0].record is not None

    @wraps(function)
    def guarded(first: Any, /, *arguments: Any, **options: Any) -> Any:
        device: torch.device = first[0].device if in_record else first.device
        if device.index == torch.cuda.current_device():
            return function(first, *arguments, **options)
        with torch.cuda.device(device):
            return function(first, *arguments, **options)

    return guarded


def hopper_kernels(load: Any = None) -> dict[str, Any]:
    """Return the kernels for Hopper by their names in `LaunchOptions`. load: used in place of `hopper.loaded`."""
    from specgraph_cuda import hopper
    from specgraph_cuda.few_rows import few_rows
    from specgraph_cuda.many_rows import linears
    from specgraph_cuda.two_linears import two_linears_in_one

    load = load or hopper.loaded
    return {
        "many_rows": linears(load=load),
        "two_linears": two_linears_in_one(load=load),
        "few_rows": few_rows(load=load),
    }


def kernels_of(device: torch.device) -> dict[str, Any]:
    """Return `hopper_kernels`, for linears of up to 384 rows. Empty without Hopper, cuda-bindings or NVRTC."""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != (9, 0) or properties.multi_processor_count < BLOCKS:
        return {}
    try:
        from specgraph_cuda.hopper import why_not

        found, reason = hopper_kernels(), why_not()
    except ImportError:
        found, reason = {}, "cuda-bindings is not installed (pip install cuda-bindings)"
    if reason is None:
        return found
    _log.info("linears of more than 32 rows run in Triton and the library's matmul: %s", reason)
    return {}


def register_kernels(device: torch.device) -> str:
    """Register the kernels for CUDA tensors, once per process. Later calls change nothing.

    Returns:
        A text for the user: which tiles the linears take.
    """
    properties = torch.cuda.get_device_properties(device)
    overlap = properties.major >= 9
    chosen, shipped = tile_for, "those tuned on an NVIDIA H200"
    if properties.shared_memory_per_block_optin < 163 << 10:  # GeForce and RTX, A10, L4, L40S: 99 KiB
        chosen, shipped = default_tile, "small ones that nobody tuned"
    wide = properties.shared_memory_per_block_optin >= 227 << 10
    options = LaunchOptions(
        overlap=overlap_previous if overlap else None,
        extra={"launch_pdl": True} if overlap else {},
        tile=chosen,
        **kernels_of(device),
        attention=attention_for if wide else default_attention,
        most_head_dim=576 if wide else 256,
        compute_units=properties.multi_processor_count,
        float8=(properties.major, properties.minor) >= (8, 9),
        keep_compiled=True,
    )
    register("CUDA", options, around=on_its_device)
    return shipped


def compile_ahead(bodies: Sequence[Callable[[], None]], progress: Callable[[int, int], None]) -> None:
    """Compile the kernels that `bodies` launch on the current device; see `Platform.compile_ahead`."""
    launchers, found = launchers_of("CUDA"), {}
    if launchers[0].options.many_rows is not None:
        from specgraph_cuda import hopper

        def load(kernel: Any, plan: Any, device: torch.device) -> Any:
            found[kernel, plan] = None
            return kernel

        own = hopper_kernels(load=load)
        launchers = [replace(each, options=replace(each.options, **own)) for each in launchers]
    work = compilations(launchers, bodies)
    compile_all([*work, *(hopper.compilation(*each) for each in found)], progress)
