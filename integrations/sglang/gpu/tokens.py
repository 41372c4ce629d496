"""Greedy tokens and acceptance of 64 prompts, in SGLang as it is or with the plugin: one JSON file per way.

python tokens.py --way stock --out stock.json
python tokens.py --way specgraph --out specgraph.json
python tokens.py --compare stock.json specgraph.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from engine import acceptance, environment, generate, options, python_prompts, sglang_draft

from specgraph import shipped_pair

AT_ONCE = (64, 8)


def compare(stock: Path, mine: Path) -> None:
    """Prints how many prompts have equal tokens, and where the others differ first."""
    theirs, ours = json.loads(stock.read_text()), json.loads(mine.read_text())
    for name in (f"at_once_{n}" for n in AT_ONCE):
        pairs = list(zip(theirs[name]["tokens"], ours[name]["tokens"], strict=True))
        first = {
            index: next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
            for index, (x, y) in enumerate(pairs)
            if x != y
        }
        print(name, "equal", len(pairs) - len(first), "of", len(pairs), "first differences", first)
        for way, read in (("stock", theirs), ("specgraph", ours)):
            print("  ", way, read[name]["acceptance_per_position"], "rounds", read[name]["rounds"])


def run(way: str, out: Path, prompts: int, max_tokens: int, overlap: bool, port: int) -> None:
    """Generate and write."""
    from sglang.srt.entrypoints.engine import Engine

    begin = time.monotonic()
    target, draft = shipped_pair()
    arguments = options(
        str(target), sglang_draft(draft), way, dtype="float16", mem_fraction_static=0.3, max_total_tokens=1 << 17,
        disable_overlap_schedule=not overlap, port=port, cuda_graph_bs_decode=[8, 64],
    )  # fmt: skip
    engine = Engine(**arguments)
    result: dict[str, Any] = {
        "command": " ".join(sys.argv), "environment": environment(), "way": way, "overlap": overlap,
        "start_up_s": round(time.monotonic() - begin, 1),
    }  # fmt: skip
    print("started", result["start_up_s"], flush=True)
    asked = python_prompts(target / "tokenizer.json", prompts, seed=1)
    for at_once in AT_ONCE:
        tokens, histogram = generate(engine, asked, at_once, max_tokens)
        part = {"acceptance_per_position": acceptance(histogram), "rounds": sum(histogram)}
        print(way, at_once, part, round(time.monotonic() - begin, 1), flush=True)
        result[f"at_once_{at_once}"] = part | {"tokens": tokens}
        out.write_text(json.dumps(result))
    engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=["stock", "specgraph"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("STOCK", "SPECGRAPH"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--no-overlap", action="store_true", help="SGLang's --disable-overlap-schedule")
    parser.add_argument("--port", type=int, default=30000)
    asked = parser.parse_args()
    if asked.compare:
        compare(*asked.compare)
    else:
        run(asked.way, asked.out, asked.prompts, asked.max_tokens, not asked.no_overlap, asked.port)


if __name__ == "__main__":
    main()
