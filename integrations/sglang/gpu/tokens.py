"""Greedy and sampled tokens of the shipped target in SGLang, stock or with the plugin: one JSON file per way.

    export PYTHONPATH=integrations/gpu
    python integrations/sglang/gpu/tokens.py --way stock --out stock.json
    python integrations/sglang/gpu/tokens.py --way specgraph --out specgraph.json
    python integrations/sglang/gpu/tokens.py --compare stock.json specgraph.json

`--way off` has the plugin loaded and SGLang's own algorithm. With `--method eagle --drafter DIR`, an EAGLE-1 drafter.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from engine import ALGORITHMS, environment, generate, make_engine, options, proposes, sglang_draft
from prompts import acceptance, python_prompts

from specgraph import shipped_pair

AT_ONCE = (64, 8)
SAMPLED, SAMPLED_TOKENS, POSITIONS = 512, 24, (7, 11, 15, 19, 23)
"""Requests per sampled prompt, their new tokens, and the positions whose tokens are counted: all are after the first
round, which SGLang drafts itself."""


def chance(theirs: dict[str, int], ours: dict[str, int]) -> float:
    """P value of the chi-square test that two samples have one distribution; values seen less than 10 times are one."""
    rare = {key for key in theirs.keys() | ours.keys() if theirs.get(key, 0) + ours.get(key, 0) < 10}
    rows = [[sample.get(key, 0) for key in sorted((theirs.keys() | ours.keys()) - rare)] for sample in (theirs, ours)]
    rest = [sum(sample.get(key, 0) for key in rare) for sample in (theirs, ours)]
    if sum(rest):
        rows = [[*row, more] for row, more in zip(rows, rest, strict=True)]
    seen = torch.tensor(rows, dtype=torch.float64)
    if seen.shape[1] < 2:
        return 1.0
    expected = seen.sum(1, keepdim=True) * seen.sum(0, keepdim=True) / seen.sum()
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((seen.shape[1] - 1) / 2, dtype=torch.float64), statistic / 2))


def compare(stock: Path, mine: Path) -> dict[str, Any]:
    """How many prompts have equal tokens, where the others differ first, and whether samples have one distribution."""
    theirs, ours = json.loads(stock.read_text()), json.loads(mine.read_text())
    result: dict[str, Any] = {
        "page_size": ours["page_size"],
        "method": ours["method"],
        "ways": [r["way"] for r in (theirs, ours)],
    }
    for name in (f"at_once_{n}" for n in AT_ONCE):
        pairs = list(zip(theirs[name]["tokens"], ours[name]["tokens"], strict=True))
        first = {
            index: next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
            for index, (x, y) in enumerate(pairs)
            if x != y
        }
        result[name] = {
            "prompts": len(pairs), "equal": len(pairs) - len(first), "first_differences": first,
            "acceptance_per_position": [r[name]["acceptance_per_position"] for r in (theirs, ours)],
            "rounds": [r[name]["rounds"] for r in (theirs, ours)],
        }  # fmt: skip
    chances = [
        round(chance(x, y), 4)
        for one, other in zip(theirs["sampled"]["counts"], ours["sampled"]["counts"], strict=True)
        for x, y in zip(one, other, strict=True)
    ]
    result["sampled"] = {
        "tests": len(chances), "smallest_p": min(chances), "p_values": chances,
        "acceptance_per_position": [r["sampled"]["acceptance_per_position"] for r in (theirs, ours)],
    }  # fmt: skip
    result["proposes"] = ours["proposes"]
    return result


def run(asked: argparse.Namespace) -> None:
    """Generate and write."""
    begin = time.monotonic()
    target, draft = shipped_pair()
    arguments = options(
        str(target), sglang_draft(asked.drafter or draft), asked.way, asked.method, dtype="float16",
        mem_fraction_static=0.5, max_total_tokens=1 << 17, disable_overlap_schedule=asked.no_overlap, port=asked.port,
        page_size=asked.page_size, cuda_graph_bs_decode=[8, 64],
    )  # fmt: skip
    engine = make_engine(arguments, asked.out)
    result: dict[str, Any] = {
        "command": " ".join(sys.argv), "environment": environment(), "way": asked.way, "method": asked.method,
        "page_size": asked.page_size, "overlap": not asked.no_overlap, "start_up_s": round(time.monotonic() - begin, 1),
    }  # fmt: skip
    print("started", result["start_up_s"], flush=True)
    prompts = python_prompts(target / "tokenizer.json", asked.prompts, seed=1)
    for at_once in AT_ONCE:
        tokens, histogram = generate(engine, prompts, at_once, asked.max_tokens)
        part = {"acceptance_per_position": acceptance(histogram), "rounds": sum(histogram)}
        print(asked.way, at_once, part, round(time.monotonic() - begin, 1), flush=True)
        result[f"at_once_{at_once}"] = part | {"tokens": tokens}
        asked.out.write_text(json.dumps(result))
    counts: list[Any] = []
    total = [0] * len(histogram)
    for prompt in prompts[:4]:
        tokens, histogram = generate(engine, [prompt] * SAMPLED, SAMPLED, SAMPLED_TOKENS, temperature=1.0)
        counts.append([dict(Counter(str(got[position]) for got in tokens)) for position in POSITIONS])
        total = [a + b for a, b in zip(total, histogram, strict=True)]
    result["sampled"] = {"requests": SAMPLED, "counts": counts, "acceptance_per_position": acceptance(total)}
    time.sleep(2)  # the last proposes are written
    result["proposes"] = proposes(asked.out)
    print(asked.way, "sampled", acceptance(total), result["proposes"], round(time.monotonic() - begin, 1), flush=True)
    asked.out.write_text(json.dumps(result))
    engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=["stock", "off", "specgraph"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("STOCK", "SPECGRAPH"))
    parser.add_argument("--method", choices=list(ALGORITHMS), default="eagle3")
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--no-overlap", action="store_true", help="SGLang's --disable-overlap-schedule")
    parser.add_argument("--port", type=int, default=30000)
    asked = parser.parse_args()
    if asked.compare:
        compared = compare(*asked.compare)
        print(json.dumps(compared, indent=1))
        if asked.out:
            asked.out.write_text(json.dumps(compared, indent=1) + "\n")
    else:
        run(asked)


if __name__ == "__main__":
    main()
