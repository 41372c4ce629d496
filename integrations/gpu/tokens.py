"""Compares tokens of the shipped pair in a host engine, greedy and sampled, with and without the plugin.

    python integrations/gpu/tokens.py --engine vllm --way stock --out stock.json
    python integrations/gpu/tokens.py --engine vllm --way specgraph --out specgraph.json
    python integrations/gpu/tokens.py --compare stock.json specgraph.json --out compared.json

Each way writes one JSON file. `--way off` loads the plugin and drafts by the engine's own code. `--method eagle
--drafter DIR` takes an EAGLE-1 drafter of the shipped target; `--method mtp --target DIR` takes a folder that
integrations/vllm/tests/mimo.py writes. `--options` are further arguments of the engine, such as '{"page_size": 1}' for
SGLang.
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
from engines import ENGINES, engine_class, environment
from prompts import acceptance, python_prompts
from specgraph_run import shipped_pair

KV_TOKENS = 1 << 17
GREEDY = {"one": 1, "all": 64, "eight": 8}
"""Requests that run at once, by part. The first part has one prompt."""
SAMPLED, SAMPLED_TOKENS, POSITIONS = 512, 24, (7, 11, 15, 19, 23)
"""For an engine without seeds: requests per sampled prompt, their new tokens, and the positions to count tokens at. All
positions are after the first round: the engine drafts that one itself."""


def chance(theirs: dict[str, int], ours: dict[str, int]) -> float:
    """Return the p-value of the chi-square test that two samples have one distribution.

    Values that were seen less than 10 times count as one value.
    """
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
    """Count the prompts with equal tokens, find the first difference of the others, and test sampled tokens."""
    theirs, ours = json.loads(stock.read_text()), json.loads(mine.read_text())
    result: dict[str, Any] = {"method": ours["method"], "ways": [each["way"] for each in (theirs, ours)]}
    for name in [name for name in ours if isinstance(ours[name], dict) and "tokens" in ours[name]]:
        pairs = list(zip(theirs[name]["tokens"], ours[name]["tokens"], strict=True))
        first = {
            index: next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
            for index, (x, y) in enumerate(pairs)
            if x != y
        }
        result[name] = {
            "prompts": len(pairs), "equal": len(pairs) - len(first), "first_differences": first,
            "acceptance_per_position": [each[name]["acceptance_per_position"] for each in (theirs, ours)],
            "rounds": [each[name]["rounds"] for each in (theirs, ours)],
        }  # fmt: skip
    if "counts" in ours["sampled"]:
        chances = [
            round(chance(x, y), 4)
            for one, other in zip(theirs["sampled"]["counts"], ours["sampled"]["counts"], strict=True)
            for x, y in zip(one, other, strict=True)
        ]
        result["sampled"] = {"tests": len(chances), "smallest_p": min(chances), "p_values": chances}
    return result | {"proposes": ours["proposes"]}


def run(asked: argparse.Namespace) -> None:
    """Generate all parts. Write the file after each part, so that a part that fails loses nothing."""
    begin = time.monotonic()
    make, drafter = engine_class(asked.engine).shipped, None if asked.method == "mtp" else asked.drafter
    engine = make(asked.target, drafter, asked.way, asked.method, KV_TOKENS, **asked.options)
    prompts = python_prompts(asked.target / "tokenizer.json", asked.prompts, seed=1)
    result: dict[str, Any] = {
        "command": " ".join(sys.argv), "environment": environment(asked.engine), "way": asked.way,
        "method": asked.method, "options": asked.options, "start_up_s": round(time.monotonic() - begin, 1),
    }  # fmt: skip

    def add(name: str, histogram: list[int], **more: Any) -> None:
        part = {"acceptance_per_position": acceptance(histogram), "rounds": sum(histogram)}
        print(asked.way, name, part, round(time.monotonic() - begin, 1), flush=True)
        result[name] = part | more
        asked.out.write_text(json.dumps(result))

    for name, at_once in GREEDY.items():
        tokens, histogram = engine.generate(prompts[:1] if name == "one" else prompts, at_once, asked.max_tokens)
        add(name, histogram, tokens=tokens)
    if engine.seeded:
        tokens, histogram = engine.generate(prompts, 64, asked.max_tokens, sampled=True)
        add("sampled", histogram, tokens=tokens)
    else:
        counts: list[Any] = []
        total: list[int] = []
        for prompt in prompts[:4]:
            tokens, histogram = engine.generate([prompt] * SAMPLED, SAMPLED, SAMPLED_TOKENS, sampled=True)
            counts.append([dict(Counter(str(got[position]) for got in tokens)) for position in POSITIONS])
            total = [sum(pair) for pair in zip(total or [0] * len(histogram), histogram, strict=True)]
        add("sampled", total, counts=counts)
    result["proposes"] = engine.proposes()
    asked.out.write_text(json.dumps(result))
    engine.close()


def main() -> None:
    """Generate tokens, or compare two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--way", choices=("stock", "off", "specgraph"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("STOCK", "SPECGRAPH"))
    parser.add_argument("--target", type=Path, default=shipped_pair()[0])
    parser.add_argument("--drafter", type=Path, default=shipped_pair()[1])
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--options", type=json.loads, default={})
    asked = parser.parse_args()
    if asked.compare:
        asked.out.write_text(json.dumps(compare(*asked.compare), indent=1) + "\n")
        print(asked.out.read_text())
    else:
        run(asked)


if __name__ == "__main__":
    main()
