"""CPU time of the linears of SmolLM2-135M with 1 and 6 rows, plain and in oneDNN's layout, and of a whole round.

    python benchmarks/packed_linears.py model.gguf drafters/smollm2/specgraph_smollm2/eagle3 --json FILE

`plain` is F.linear, `packed` is torch.ops.mkldnn._linear_pointwise over a weight that was laid out once for 6 rows. All
ways run in turns in one thread; times are its CPU time, in ms, medians.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import linear

from specgraph import load_generator
from specgraph.cli.env import cpu_name

SHAPES = {
    "qkv": (960, 576, 30), "output": (576, 576, 30), "gate_up": (3072, 576, 30), "down": (576, 1536, 30),
    "lm_head": (49152, 576, 1),
}  # fmt: skip
"""Rows and columns of a matrix, and how many the target has."""


def products(turns: int) -> dict[str, float]:
    """Return the time of all products of one pass of the target."""
    pack, run = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    plain = {name: [torch.randn(out, into) for _ in range(n)] for name, (out, into, n) in SHAPES.items()}
    packed = {name: [pack(each, 6) for each in weights] for name, weights in plain.items()}
    times = defaultdict[str, list[float]](list)
    for turn in range(turns + 2):
        for rows in (1, 6):
            for name, (_, columns, _) in SHAPES.items():
                x = torch.randn(rows, columns)
                ways: dict[str, Callable[[int], torch.Tensor]] = {
                    "plain": lambda i, x=x, name=name: linear(x, plain[name][i]),
                    "packed": lambda i, x=x, name=name: run(x, packed[name][i], None, "none", [], ""),
                }
                assert torch.allclose(ways["plain"](0), ways["packed"](0), atol=1e-3)
                for way, call in ways.items():
                    start = time.process_time()
                    for i in range(SHAPES[name][2]):
                        call(i)
                    if turn >= 2:
                        times[f"{name}, {rows} rows, {way}"].append(1e3 * (time.process_time() - start))
    found = {key: round(statistics.median(values), 2) for key, values in times.items()}
    for rows in (1, 6):
        for way in ("plain", "packed"):
            found[f"all, {rows} rows, {way}"] = round(sum(found[f"{name}, {rows} rows, {way}"] for name in SHAPES), 1)
    return found


def rounds(target: Path, head: Path) -> dict[str, float]:
    """Return the time of a round of one request, without drafts and with a chain of 5."""
    found: dict[str, float] = {}
    for way, speculate in (("target alone", False), ("EAGLE-3 chain, K = 5", True)):
        with load_generator(
            target, head, platform="cpu", dtype="float32", speculate=speculate, max_model_len=512
        ) as made:
            made.decoder.add(made.request("Write a story about a river.", chat=True, max_tokens=250))
            times: list[float] = []
            while len(times) < 40:
                start = time.process_time()
                made.decoder.step()
                times.append(1e3 * (time.process_time() - start))
            found[way] = round(statistics.median(times[8:]), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the GGUF file")
    parser.add_argument("head", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        found = {"products_ms": products(20), "rounds_ms": rounds(asked.target, asked.head)}
    about = {"command": f"python benchmarks/packed_linears.py {asked.target.name} {asked.head} --json FILE"}
    about |= {"torch": torch.__version__, "cpu": cpu_name()}
    asked.json.write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
