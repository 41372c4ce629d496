"""`specgraph tune`: the fastest tiles of a drafter's linears on this GPU, kept in the user's cache."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from specgraph.cli.env import environment
from specgraph.cli.options import JsonOption, PlatformOption, parse_numbers
from specgraph.cli.output import check_output, write_json
from specgraph.errors import ConfigError
from specgraph.options import StoredWeights


def tune(
    platform: PlatformOption = None,
    shape: Annotated[str, typer.Option(help="A drafter by name, with random weights.")] = "eagle3-llama3-8b",
    requests: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,32,64",
    k: Annotated[int, typer.Option("-k", min=1, help="Draft tokens per propose.")] = 5,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    weights: Annotated[StoredWeights, typer.Option(help="fp8 has a scale per row.")] = "plain",
    json: JsonOption = None,
) -> None:
    """Time the tiles of a drafter's linears on this GPU; later runs of this user take the fastest ones.

    Whole proposes are then timed with the tiles before and with these, in turns: only tiles that make them faster are
    kept. The table is in the user's cache, by device, Triton version and shape. `specgraph bench` says which tiles it
    used.
    """
    sizes = parse_numbers("--requests", requests)
    check_output("--json", json)
    import torch

    from specgraph.device import open_platform
    from specgraph.options import dtype_named
    from specgraph.tools.shapes import random_head, shape_named
    from specgraph.tools.tune import is_faster, propose_times, shapes_of, triton_ops
    from specgraph.tools.tune import tune as measure

    named, chosen = shape_named(shape), dtype_named(dtype)
    if chosen not in (torch.bfloat16, torch.float16):
        raise ConfigError(f"--dtype {dtype}: the tiles are those of bfloat16 and float16")
    opened = open_platform(platform)
    triton_ops(opened)
    from specgraph.ops.triton.launch import Tile
    from specgraph.ops.triton.tile_table import LinearShape, cache_file, read_tiles, write_tiles

    path = cache_file(opened.info.device_name, opened.info.versions["triton"])
    before = read_tiles(path)
    with torch.inference_mode():
        head = random_head(named, opened.device, chosen, 64, weights=weights)
        shapes = shapes_of(opened, head, sizes, k)
        print(f"{opened.info.device_name}: {len(shapes)} linears of {shape}", file=sys.stderr)
        times = measure(opened, shapes, chosen)
        tiles: dict[LinearShape, Tile | None] = {**before, **{key: found[0][1] for key, found in times.items()}}
        proposes = propose_times(opened, head, sizes, k, [before, tiles])
    about = environment(opened)
    rows: list[dict[str, Any]] = []
    for key, found in times.items():
        library = next(us for us, tile in found if tile is None)
        us, tile = found[0]
        rows.append({**key._asdict(), "us": round(us, 2), "library_us": round(library, 2), "tile": repr(tile)})
        kept = "the library's matmul" if tile is None else tile
        print(f"{key.kind} {key.rows} x {key.columns} x {key.depth}: {us:.1f} us with {kept} (library {library:.1f})")
    compared: list[dict[str, Any]] = []
    for n, (old, new) in zip(sizes, proposes, strict=True):
        compared.append({"requests": n, "before_us": round(old, 1), "tuned_us": round(new, 1)})
        print(f"propose of {n} requests: {old:.1f} us with the tiles before, {new:.1f} with these")
    kept = is_faster(proposes)
    if kept:
        write_tiles(path, tiles, about)
        print(f"wrote {path}", file=sys.stderr)
    else:
        print("not kept: whole proposes are not 0.5 % faster with these tiles", file=sys.stderr)
    write_json({**about, "tiles": rows, "proposes": compared, "kept": kept}, json)
