"""Tiles for the linears of a 1B Llama's shape with an EAGLE-3 head: alone, and in whole rounds.

    python benchmarks/tiles_1b.py --json FILE

Each candidate is timed alone (`alone_us`: microseconds and [columns, depth, warps, stages, prefetch], fastest first;
None is the library's matmul). Then rounds (lowering `round`, K = 5, acceptance 0.7) with the shipped tiles, with the
fastest ones, and with the shipped ones again take turns; microseconds of a round, medians of 8 stretches of 15 rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import astuple, replace
from pathlib import Path

import torch

from specgraph import open_platform
from specgraph.tools import tune
from specgraph.tools.rounds import add_prompts, captured_decoder, random_target, rounds_in_turns
from specgraph.tools.shapes import SHAPES, random_head

LENGTH, CONTEXT = 256 + 300 * 6, 256
SHAPE = replace(SHAPES["eagle3-llama3-8b"], num_layers=1, hidden_size=2048, intermediate_size=8192, head_dim=64)


def candidates(table):
    """Tiles to time by shape; the shipped one first."""
    from specgraph.ops.triton.launch import Tile
    from specgraph.ops.triton.tile_table import LinearShape

    tried = {
        ("linear", 16): [(16, 512, 2, 3), (16, 512, 2, 4), (16, 512, 4, 4), (16, 256, 2, 6), (16, 256, 4, 6),
                         (16, 256, 4, 8), (32, 256, 4, 4)],
        ("linear", 64): [(16, 256, 2, 4), (16, 256, 4, 4), (16, 128, 2, 6), (16, 128, 4, 6), (32, 256, 4, 3)],
        ("gate_up", 16): [(64, 128, 4, 4), (64, 128, 4, 3), (64, 256, 4, 3), (64, 64, 4, 6), (32, 256, 4, 4),
                          (32, 128, 4, 6), (64, 128, 8, 4)],
        ("gate_up", 64): [(64, 128, 4, 3), (64, 64, 4, 5), (64, 64, 8, 5), (32, 128, 4, 4), (64, 128, 8, 3)],
    }  # fmt: skip
    sizes = {
        "linear": [(2048, 2048), (3072, 2048), (2048, 8192), (3072, 4096), (2048, 6144)],
        "gate_up": [(8192, 2048)],
    }
    found = {}
    for (kind, rows), tiles in tried.items():
        prefetch = 64 if kind == "gate_up" else 512 if rows == 16 else 256
        for size in sizes[kind]:
            shape = LinearShape(kind, rows, *size)
            found[shape] = [table.otherwise(*shape), *(Tile(*tile, prefetch) for tile in tiles)]
    return found


def time_alone(platform, ops, work, rows):
    """The fastest tile of each shape where that is at least 3 % faster than the shipped one."""
    best = {}
    for shape, tiles in work.items():
        size = shape.columns * shape.depth * 2 * (2 if shape.kind == "gate_up" else 1)
        copies = min(40, max(3, -(-(250 << 20) // size)))
        call = tune.linear_call(shape, copies, platform.device, torch.bfloat16)
        timed = tune._timed(platform, ops, call, copies, dict.fromkeys([None, *tiles]))
        shipped = next((us for us, tile in timed if tile == tiles[0]), float("inf"))
        us, tile = next(pair for pair in timed if pair[1] is not None)
        if us < 0.97 * shipped:
            best[shape] = tile
        times = [[round(us, 2), None if tile is None else astuple(tile)] for us, tile in timed]
        rows.append({"shape": list(shape), "shipped": shipped, "times": times})
        print(rows[-1], flush=True)
    return best


def time_rounds(platform, table, best, rows):
    """Rounds of 1 and of 8 requests."""
    target = random_target(replace(SHAPE, num_layers=16), platform.device, torch.bfloat16, LENGTH)
    head = random_head(SHAPE, platform.device, torch.bfloat16, LENGTH)
    for requests in (1, 8):
        prompts = torch.randint(0, 1000, (requests, CONTEXT)).tolist()
        made = {}
        for name, tiles in (("shipped", {}), ("best", best), ("shipped again", {})):
            with table.using(tiles):
                made[name] = captured_decoder(
                    platform, target, head, num_speculative_tokens=5, max_num_requests=requests, max_model_len=LENGTH,
                    prefill_sizes=[CONTEXT], synthetic_acceptance=0.7, lowering="round",
                )  # fmt: skip
            add_prompts(made[name], prompts)
            for _ in range(6):
                made[name].step()
        times = rounds_in_turns(list(made.values()), turns=8, rounds=15, lead=2)
        us = {name: round(statistics.median(each) * 1e6, 1) for name, each in zip(made, times, strict=True)}
        rows.append({"requests": requests, **us})
        print(rows[-1], flush=True)
        for decoder in made.values():
            decoder.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    platform = open_platform(asked.platform)
    ops = tune.triton_ops(platform)
    table = ops.options.tile
    work, rows, rounds = candidates(table), [], []
    tune.compile_all(asked.platform, [(s, t) for s, tiles in work.items() for t in tiles if t], torch.bfloat16)
    with torch.inference_mode():
        best = time_alone(platform, ops, work, rows)
        time_rounds(platform, table, best, rounds)
    report = {"command": " ".join(["python", *sys.argv]), "device": platform.info.device_name}
    report |= {"versions": dict(platform.info.versions), "alone_us": rows, "rounds": rounds}
    asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
