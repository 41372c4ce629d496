"""Chains, trees, trees for small batches with chains for large ones, and K by acceptance: tokens per second by batch.

    python benchmarks/schedules.py --platform cuda --json FILE

A target and an EAGLE-3 head with random weights; drafts are accepted by chance. `tokens_per_second` is the expected
number of tokens of a round (which the chances give) over its measured time, so that no luck of few rounds is in it.
For `auto` it is what `-k auto` drafts once its estimate has settled; `best` is the fixed K with the most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from random import Random
from typing import Any

import torch

from specgraph.cli.env import environment
from specgraph.device import open_platform
from specgraph.draft import DraftTree
from specgraph.engine import SpeculativeDecoder
from specgraph.engine.config import acceptance_chances
from specgraph.tools.rounds import TARGETS, add_prompts, captured_decoder, random_target
from specgraph.tools.shapes import random_head, shape_named

CHAIN = (0.794, 0.639, 0.569, 0.517, 0.478)
TREE = (0.889, 0.734, 0.665, 0.600, 0.552)
"""Accepted at each place with the shipped EAGLE-3 pair (docs/acceptance.md)."""


def expected(chances: Sequence[float], k: int) -> float:
    """Tokens per request and round."""
    return 1 + sum(accumulate(chances[:k], mul))


def run(decoder: SpeculativeDecoder, requests: int, context: int, seed: int) -> None:
    """Let this many requests join and run a few rounds."""
    for one in list(decoder.rounds.running):
        decoder.cancel(one.index)
    decoder.step()
    g = torch.Generator().manual_seed(seed)
    vocab = decoder.target.model.vocab_size
    add_prompts(decoder, torch.randint(0, vocab, (requests, context), generator=g).tolist())
    for _ in range(3):
        decoder.step()


def round_ms(decoder: SpeculativeDecoder, rounds: int, repeats: int) -> float:
    """Median over stretches of `rounds` rounds."""
    times: list[float] = []
    for _ in range(2):
        decoder.step()
    for _ in range(repeats):
        decoder.platform.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            decoder.step()
        decoder.platform.synchronize()
        times.append((time.perf_counter() - start) / rounds * 1e3)
    return statistics.median(times)


def settle(decoder: SpeculativeDecoder, chances: Sequence[float]) -> None:
    """Show the policy 4,000 drafts accepted by these chances."""
    random, policy = Random(0), decoder.rounds.adaptive
    k = decoder.config.num_speculative_tokens
    for _ in range(500):
        counts = [next((i for i in range(k) if random.random() >= chances[i]), k) for _ in range(8)]
        policy.rates.observe(k, counts)


def measure(a: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Measure, print and write rows."""
    platform, sizes = open_platform(a.platform), [int(n) for n in a.requests.split(",")]
    dtype = getattr(torch, a.dtype)
    length = a.context + 6 * 8 * (3 + 2 + a.rounds * a.repeats)
    target = random_target(TARGETS[a.target], platform.device, dtype, length)
    head = random_head(shape_named(a.shape), platform.device, dtype, length)
    tree = DraftTree(num_steps=5, top_k=4, num_draft_tokens=16)
    report = {**environment(platform), "command": " ".join(["python", *sys.argv]), "dtype": a.dtype, "rows": rows}
    report |= {"target": a.target, "shape": a.shape, "context": a.context, "tree": str(tree), "lowering": a.lowering}

    def decoder_of(**settings: Any) -> SpeculativeDecoder:
        start = time.perf_counter()
        made = captured_decoder(
            platform, target, head, num_speculative_tokens=5, max_num_requests=sizes[-1], max_model_len=length,
            capture_sizes=sizes, prefill_sizes=[min(512, a.context)], decode=a.lowering, synthetic_acceptance=CHAIN,
            **settings,
        )  # fmt: skip
        print(f"captured {settings}: {time.perf_counter() - start:.1f} s", flush=True)
        return made

    def add(**row: Any) -> None:
        rows.append(row)
        if a.json:  # after every row, so that a run that is cut off leaves what it measured
            with open(a.json, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=1)
        print(row, flush=True)

    trees = {"tree": tree, "synthetic_tree_acceptance": TREE}
    shares = {"chain": acceptance_chances(CHAIN, 5), "tree": acceptance_chances(TREE, 5)}
    border = a.border
    ways = () if a.only_auto else (("tree", None), (f"tree to {border}, then chain", {border: "tree", sizes[-1]: 5}))
    for name, schedule in ways:
        decoder = decoder_of(**trees, draft_schedule=schedule)
        for n in sizes:
            run(decoder, n, a.context, seed=n)
            ms = round_ms(decoder, a.rounds, a.repeats)
            kind = "tree" if decoder.config.shape(n).tree else "chain"
            tokens = expected(shares[kind], 5)
            add(requests=n, drafts=name, acceptance="pair", drafted=kind, round_ms=round(ms, 3),
                tokens_per_second=round(n * tokens / ms * 1e3, 1))  # fmt: skip
        decoder.close()
        del decoder
    start = time.perf_counter()
    decoder = decoder_of(k_candidates=(1, 2, 3, 5))
    policy = decoder.rounds.adaptive
    report["round_times_us"] = {n: {k: round(t, 1) for k, t in row.items()} for n, row in policy.times.items()}
    report["capture_and_timing_seconds"] = round(time.perf_counter() - start, 1)
    print(report["round_times_us"], flush=True)
    choose = policy.choose
    for acceptance in ("pair", *map(float, a.acceptance.split(","))):
        if acceptance == "pair" and a.only_auto:
            continue
        chances = shares["chain"] if acceptance == "pair" else (acceptance,) * 5
        decoder.target.verify_program._chances[:5].copy_(torch.tensor(chances))
        for n in sizes if acceptance == "pair" else [n for n in sizes if n in (1, 8, 32, 64)]:
            run(decoder, n, a.context, seed=n)
            settle(decoder, chances)
            found: dict[int, float] = {}
            auto: dict[str, Any] = {}
            for way in Random(n).sample((1, 2, 3, 5, 0), 5):
                used: Counter[int] = Counter()

                def chosen(size: int, used: Counter[int] = used, way: int = way) -> int:
                    used[k := way or choose(size)] += 1
                    return k

                policy.choose = chosen
                ms = round_ms(decoder, a.rounds, a.repeats)
                tokens = sum(expected(chances, k) * count for k, count in used.items()) / used.total()
                rate = n * tokens / ms * 1e3
                row = {"requests": n, "drafts": f"K {way}" if way else "auto", "acceptance": acceptance}
                row |= {"round_ms": round(ms, 3), "tokens_per_second": round(rate, 1)}
                if way:
                    found[way] = rate
                    add(**row)
                else:
                    auto = row | {"chosen": dict(used)}
            best = max(found, key=lambda k: found[k])
            add(**auto, best=best, of_best=round(auto["tokens_per_second"] / found[best], 3))
    decoder.close()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--target", default="llama3-8b")
    parser.add_argument("--shape", default="eagle3-llama3-8b")
    parser.add_argument("--requests", default="1,4,8,16,32,64")
    parser.add_argument("--border", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lowering", default="merged", help="merged or round")
    parser.add_argument("--acceptance", default="0.3,0.6,0.9", help="of each draft token, for fixed K against auto")
    parser.add_argument("--only-auto", action="store_true", help="leave out trees, and the pair's acceptance")
    parser.add_argument("--json", default="")
    a = parser.parse_args()
    with torch.inference_mode():
        measure(a, [])


if __name__ == "__main__":
    main()
