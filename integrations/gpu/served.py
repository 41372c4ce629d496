"""Requests that arrive at random times at SGLang, which drafts by itself and through specgraph, in turns.

    python integrations/gpu/served.py --out FILE
    python integrations/gpu/served.py --target FOLDER --drafter FOLDER --rates 10,30,60 --out FILE

8B shapes with dummy weights, K = 5, no prefix cache, prompts of 64 to 2,048 tokens, outputs of 128. How many drafts are
accepted is drawn by the engine, as many on average as where each one is accepted with probability 0.7. With `--target`
the weights of that folder and of an EAGLE-3 drafter's decide, and the prompts are of Python's own library. The client
is in the engine's process: `ttft` is from a request's arrival to its first token, `tpot` the mean time per token after
it, in ms; requests of the warm-up are not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines import environment
from prompts import python_prompts
from sglang_engine import Engine

NEW_TOKENS, ACCEPTANCE, MAX_LEN = 128, 0.7, 4096
SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64]


def served(engine: Any, text: Sequence[int], longest: int, rate: float, seconds: float, seed: int) -> dict[str, float]:
    """Let requests of 64 to `longest` tokens of `text` arrive for that long, and wait for the last one."""
    draw, arrived, first, last = random.Random(seed), {}, {}, {}
    begin, due, counts = time.perf_counter(), 0.0, Counter()
    while due < seconds or len(last) < len(arrived):
        while due < min(seconds, time.perf_counter() - begin):
            name = f"{seed}-{rate}-{len(arrived):06d}"
            length = draw.randrange(64, longest + 1)
            at = draw.randrange(len(text) - length)
            engine.start(name, list(text[at : at + length]), NEW_TOKENS)
            arrived[name] = begin + due
            due += draw.expovariate(rate)
        if len(last) == len(arrived):
            time.sleep(0.0005)
            continue
        for name, new, finished, _ in engine.step():
            now = time.perf_counter()
            if new:
                first.setdefault(name, now)
            counts[name] += len(new)
            if finished:
                last[name] = now
    ttft = sorted((first[name] - arrived[name]) * 1e3 for name in arrived)
    tpot = sorted((last[name] - first[name]) * 1e3 / (counts[name] - 1) for name in arrived)
    whole = max(last.values()) - begin
    return {
        "requests": len(arrived),
        "tokens_per_s": round(counts.total() / whole, 1),
        **{f"{what}_p{p}": round(times[len(times) * p // 100], 3)
           for what, times in (("ttft", ttft), ("tpot", tpot)) for p in (50, 99)},
    }  # fmt: skip


def main() -> None:
    """Run both ways at each rate, turn by turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--rates", default="2,6,10", help="requests per second")
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--first-turn", type=int, default=0, help="1 begins with the other way, for a second GPU")
    asked = parser.parse_args()
    if (asked.target is None) != (asked.drafter is None):
        parser.error("--target and --drafter are the folders of one pair: give both, or neither for 8B shapes")
    begin = time.monotonic()
    max_len, text, pair = MAX_LEN, random.Random(0).choices(range(1000, 120000), k=1 << 16), None
    if asked.target is not None:
        pair = asked.target, asked.drafter
        max_len = min(max_len, json.loads((asked.target / "config.json").read_text())["max_position_embeddings"])
        text = [token for prompt in python_prompts(asked.target / "tokenizer.json", 256, seed=1) for token in prompt]
    engine = Engine.served(SIZES, ACCEPTANCE, max_len, pair)
    result: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "environment": environment("sglang"),
        "acceptance": ACCEPTANCE if pair is None else "the weights'",
        "rows": [],
    }
    print("started", round(time.monotonic() - begin, 1), flush=True)
    for turn in (-1, *range(asked.first_turn, asked.first_turn + asked.turns)):  # -1: the warm-up
        for rate in map(float, asked.rates.split(",")):
            for way in ("stock", "specgraph") if turn % 2 else ("specgraph", "stock"):
                engine.switch(way)
                before = Counter(engine.proposes())
                row = served(engine, text, min(2048, max_len - 256), rate, asked.seconds if turn >= 0 else 2, turn)
                if turn >= 0:
                    proposes = Counter(engine.proposes()) - before
                    result["rows"].append({"rate": rate, "way": way, "turn": turn} | row | {"proposes": proposes})
                    print(result["rows"][-1], flush=True)
                    asked.out.write_text(json.dumps(result) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
