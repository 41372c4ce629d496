"""Times the tiles of a drafter's linears on the GPU at hand, for `specgraph tune`.

Each candidate runs in a graph over copies of the weights, so many that none is still in a cache, each launch overlapped
with the one before as in a captured draft step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specgraph.attention import choose_attention
from specgraph.device import LoweringName, Platform
from specgraph.draft import DraftConfig, Drafter
from specgraph.errors import UnsupportedError
from specgraph.ops import Drafts, Head
from specgraph.ops.library import dispatch_key_of
from specgraph.ops.linear import Weight, quantised
from specgraph.tools.shapes import RandomHead, lone_drafter
from specgraph.tools.timing import device_time, in_turns

if TYPE_CHECKING:
    from specgraph.ops.triton.implement import TritonOps
    from specgraph.ops.triton.launch import Tile
    from specgraph.ops.triton.tile_table import LinearShape

_COPIED_BYTES = 400 << 20
"""Weights that one graph reads: several times the largest cache."""
_LEAST_WEIGHTS = 1 << 20
"""Smaller linears are not tuned: their launch takes longer than reading them."""


def triton_ops(platform: Platform) -> TritonOps:
    """Return the Triton ops of a platform's device.

    Raises:
        UnsupportedError: it has none, or its backend chooses tiles without a table.
    """
    refused = f"platform '{platform.info.name}' has no Triton kernels with tiles to choose"
    try:
        from specgraph.ops.triton.implement import ops_of
        from specgraph.ops.triton.tile_table import TileTable
    except ImportError as error:
        raise UnsupportedError(f"{refused}: {error}") from error
    ops = ops_of(dispatch_key_of(platform.device))
    if ops is None or not isinstance(ops.options.tile, TileTable):
        raise UnsupportedError(f"{refused}; tuning is for GPUs whose backend registers them")
    return ops


def shapes_of(platform: Platform, head: RandomHead, requests: Sequence[int], k: int) -> list[LinearShape]:
    """Return the linears that a propose of each batch size asks a tile for, in order."""
    table: Any = triton_ops(platform).options.tile
    table.asked.clear()
    for n in requests:
        drafter = _drafter(platform, head, n, k, "eager")
        drafter.propose(drafter.inputs(n), copy=False)
        drafter.close()
    return [shape for shape in table.asked if shape.columns * shape.depth >= _LEAST_WEIGHTS]


def propose_times(
    platform: Platform,
    head: RandomHead,
    requests: Sequence[int],
    k: int,
    tables: Sequence[Mapping[LinearShape, Tile | None]],
    captures: int = 3,
    replays: int = 20,
) -> list[list[float]]:
    """Return the median microseconds of a whole propose, [batch size][table of tiles].

    A linear that is faster alone need not make the propose faster, where it overlaps with its neighbours. Two captures
    of one graph differ by up to 1 % in time, so each table is captured several times, and all captures take turns.
    Requests are inert: the weights are read, and there is no context.
    """
    table: Any = triton_ops(platform).options.tile
    found: list[list[float]] = []
    for n in requests:
        drafters: list[tuple[int, Drafter]] = []
        for _ in range(captures):
            for index, tiles in enumerate(tables):
                with table.using(tiles):
                    drafters.append((index, _drafter(platform, head, n, k, "merged")))
        times: list[list[float]] = [[] for _ in tables]
        for index, drafter in in_turns(drafters, replays):
            call = partial(drafter.propose, drafter.inputs(n), copy=False)
            times[index] += device_time(platform, call, repeats=1, warmup=1)
        for _, drafter in drafters:
            drafter.close()
        found.append([median(each) for each in times])
    return found


def is_faster(times: Sequence[Sequence[float]]) -> bool:
    """Return whether the second table takes at least half a percent less than the first, by the mean ratio over batch
    sizes.

    Args:
        times: from `propose_times` with two tables.
    """
    return fmean(after / before for before, after in times) < 0.995


def _drafter(platform: Platform, head: RandomHead, requests: int, k: int, lowering: LoweringName) -> Drafter:
    """Return a captured drafter for one batch size, without context."""
    attention = choose_attention("auto", platform, head.attention_layers, head.dtype).backend
    config = DraftConfig(
        num_speculative_tokens=k, max_num_requests=requests, max_model_len=64, capture_sizes=[requests],
        prefill_sizes=[16], decode=lowering, block_size=attention.preferred_block_size,
    )  # fmt: skip
    drafter = lone_drafter(platform, head, config, attention)
    drafter.capture()
    return drafter


def candidates(shape: LinearShape) -> list[Tile]:
    """Return the tiles whose pipeline fits shared memory and keeps enough bytes in flight.

    Each warp converts weights of one byte (FP8), so a warp should have columns of its own there.
    """
    from specgraph.ops.triton.launch import Tile

    fp8 = shape.kind.endswith("_fp8")
    depths, all_warps, all_stages = (128, 256, 512), (2, 4, 8), range(3, 8)
    if not fp8:
        depths, all_warps, all_stages = (64, 128, 256, 512), (2, 4), range(2, 7)
    most, least_in_flight, columns_per_warp = (32, 24, (8, 32)) if fp8 else (64, 32, (4, 64))
    width = 2 if shape.kind.startswith("gate_up") else 1
    found: list[Tile] = []
    for columns, depth, warps, stages in itertools.product((16, 32, 64, 128), depths, all_warps, all_stages):
        weights = columns * width * depth * (1 if fp8 else 2)
        shared, in_flight = (weights + 2 * shape.rows * depth) * stages, weights * (stages - 1)
        if shape.depth % depth or shared > 220 << 10 or not 8 << 10 <= weights <= most << 10:
            continue
        if not least_in_flight << 10 <= in_flight <= 132 << 10:
            continue
        if not columns_per_warp[0] * warps <= columns * width <= columns_per_warp[1] * warps:
            continue
        if not fp8 and (shape.rows * depth > 64 * 256 or shape.columns // columns < 100):
            continue
        found.append(Tile(columns, depth, warps, stages))
    return found


def linear_call(shape: LinearShape, copies: int, device: torch.device, dtype: torch.dtype) -> Callable[[Any, int], Any]:
    """Return a function (ops, copy) that runs one linear of this shape with that copy of its weights."""
    columns, depth, rows = shape.columns, shape.depth, shape.rows

    def weights() -> Tensor:
        out = 2 * columns if shape.kind.startswith("gate_up") else columns
        return (torch.randn(out, depth, device=device) * depth**-0.5).to(dtype)

    x = torch.randn(rows, depth, device=device).to(dtype)
    made = [weights() for _ in range(copies)]
    if shape.kind == "head":
        step, ids = (torch.zeros(size, dtype=torch.int64, device=device) for size in (1, rows))
        drafts = Drafts(torch.zeros(rows, 2, dtype=torch.int64, device=device), None, step, ids)
        return lambda ops, i: ops.draft_from_hidden(x, Head(None, 0.0, made[i]), drafts)
    held = [quantised(matrix) if shape.kind.endswith("_fp8") else Weight(matrix) for matrix in made]
    if shape.kind.startswith("gate_up"):
        return lambda ops, i: ops.norm_gate_up(x, None, held[i])
    return lambda ops, i: ops.norm_linear(x, None, held[i])


def tune(
    platform: Platform, shapes: Sequence[LinearShape], dtype: torch.dtype
) -> dict[LinearShape, list[tuple[float, Tile | None]]]:
    """Return the microseconds of every candidate and of the library's matmul (None) for each shape, fastest first."""
    ops, times = triton_ops(platform), {}
    shipped: Any = ops.options.tile
    tiles = {shape: dict.fromkeys([*candidates(shape), shipped.otherwise(*shape)]) for shape in shapes}
    compile_ahead(ops, [(shape, tile) for shape in shapes for tile in tiles[shape] if tile is not None], dtype)
    for shape in shapes:
        itemsize = 1 if shape.kind.endswith("_fp8") else dtype.itemsize
        size = shape.columns * shape.depth * itemsize * (2 if shape.kind.startswith("gate_up") else 1)
        copies = max(3, -(-_COPIED_BYTES // size))
        call = linear_call(shape, copies, platform.device, dtype)
        timed = _timed(platform, ops, call, copies, dict.fromkeys([None, *tiles[shape]]))
        best = [tile for _, tile in timed if tile is not None][:2]
        other = [replace(tile, prefetch=prefetch) for tile in best for prefetch in (64, 256, 1024)]
        times[shape] = sorted([*timed, *_timed(platform, ops, call, copies, other)], key=lambda pair: pair[0])
        del call
    return times


def compile_ahead(ops: TritonOps, work: Sequence[tuple[LinearShape, Tile]], dtype: torch.dtype) -> None:
    """Compile in several processes; what fails is found again when it is timed."""
    from specgraph.ops.triton.ahead import recorded
    from specgraph.ops.triton.compilation import Compilation, compile_all

    found: dict[Compilation, None] = {}
    for shape, tile in work:
        call = linear_call(shape, 1, torch.device("meta"), dtype)
        call(recorded(_with_tile(ops, tile), found), 0)
    compile_all(found)


def _with_tile(ops: TritonOps, tile: Tile | None) -> TritonOps:
    def always(kind: str, rows: int, columns: int, depth: int) -> Tile | None:
        return tile

    return type(ops)(replace(ops.options, tile=always, few_rows=None))


def _timed(
    platform: Platform, ops: TritonOps, call: Callable[[Any, int], Any], copies: int, tiles: Iterable[Tile | None]
) -> list[tuple[float, Tile | None]]:
    """Return (microseconds, tile), fastest first; tiles that need more than the device has are left out."""
    found: list[tuple[float, Tile | None]] = []
    for tile in tiles:
        chosen = _with_tile(ops, tile)
        try:
            call(chosen, 0)
        except Exception as error:
            if tile is None or "out of resource" not in str(error):
                raise
            continue
        graph = platform.graph()
        with graph.capture():
            for i in range(copies):
                call(chosen, i)
        found.append((median(device_time(platform, graph.replay, repeats=5, warmup=1)) / copies, tile))
        graph.close()
    return sorted(found, key=lambda pair: pair[0])
