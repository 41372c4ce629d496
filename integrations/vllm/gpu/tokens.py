"""Greedy tokens of the shipped pair in vLLM, stock or with the plugin, and a soak.

    VLLM_PLUGINS=          python tokens.py --way stock --out stock.json --soak 60
    VLLM_PLUGINS=specgraph python tokens.py --way specgraph --out specgraph.json --soak 60

The soak adds requests at random times, aborts some, and repeats prompts, so that the prefix cache is hit; tokens are
compared with those that this process generated for the prompt before. Near-ties can fall either way in a batch of
another size, so both ways are soaked, and the requests that differ are listed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from typing import Any

from engine import acceptance, environment, make_engine, params, python_prompts, write

from specgraph import shipped_pair

MAX_TOKENS = 128


def generate(engine: Any, prompts: list[list[int]], at_once: int) -> tuple[list[list[int]], list[int]]:
    """(tokens by prompt, accepted drafts by round). A request's first output is its prompt's, its last may be cut."""
    tokens: list[list[int]] = [[] for _ in prompts]
    accepted: list[int] = []
    for begin in range(0, len(prompts), at_once):
        part = range(begin, min(begin + at_once, len(prompts)))
        steps: dict[int, list[int]] = {index: [] for index in part}
        for index in part:
            engine.add_request(str(index), {"prompt_token_ids": prompts[index]}, params(MAX_TOKENS))
        while engine.has_unfinished_requests():
            for output in engine.step():
                new = list(output.outputs[0].token_ids)
                tokens[int(output.request_id)] += new
                if new:
                    steps[int(output.request_id)].append(len(new))
        for counts in steps.values():
            accepted += [count - 1 for count in counts[1:-1]]
    return tokens, accepted


def soak(engine: Any, prompts: list[list[int]], want: list[list[int]], seconds: float, result: dict[str, Any]) -> None:
    """Random arrivals, aborts and repeated prompts for some seconds; counts requests whose tokens are not `want`."""
    draw, serial = random.Random(1), 0
    live: dict[str, tuple[int, int, list[int]]] = {}  # prompt, max_tokens, tokens so far
    counts: dict[str, Any] = dict.fromkeys(("requests", "aborted", "finished", "tokens", "steps", "that_differ"), 0)
    counts["differing"] = []
    result["soak"] = counts
    end = time.monotonic() + seconds
    while (running := time.monotonic() < end) or live:
        while running and len(live) < 48 and draw.random() < 0.3:
            serial += 1
            prompt, limit = draw.randrange(len(prompts)), draw.randrange(1, MAX_TOKENS + 1)
            engine.add_request(f"s{serial}", {"prompt_token_ids": prompts[prompt]}, params(limit))
            live[f"s{serial}"] = (prompt, limit, [])
            counts["requests"] += 1
        if running and live and draw.random() < 0.03:
            name = draw.choice(sorted(live))
            engine.abort_request([name])
            del live[name]
            counts["aborted"] += 1
        counts["steps"] += 1
        for output in engine.step():
            if output.request_id not in live:
                continue
            prompt, limit, got = live[output.request_id]
            got += output.outputs[0].token_ids
            if not output.finished:
                continue
            del live[output.request_id]
            counts["finished"] += 1
            counts["tokens"] += len(got)
            if got != (expected := want[prompt][:limit]):
                pairs = enumerate(zip(got, expected, strict=False))
                at = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
                counts["that_differ"] += 1
                counts["differing"].append([prompt, at, got[at : at + 1], expected[at : at + 1]])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("stock", "specgraph"), required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--soak", type=float, default=0)
    asked = parser.parse_args()
    target, draft = shipped_pair()
    settings = {"capture_sizes": [1, 4, 16, 32, 64], "log_every": 500} if asked.way == "specgraph" else None
    engine, speculator = make_engine(
        str(target), str(draft), settings, dtype="float16", max_num_seqs=64, gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2 << 30,
    )  # fmt: skip
    prompts = python_prompts(target / "tokenizer.json", asked.prompts, seed=0)
    result: dict[str, Any] = {"command": " ".join(sys.argv), "way": asked.way, "environment": environment()}
    result["speculator"] = type(speculator).__name__

    def counts() -> dict[str, int]:
        return dict(speculator.counts.by_reason) if asked.way == "specgraph" else {}

    for name, part, at_once in (("one", prompts[:1], 1), ("all", prompts, 64), ("eight", prompts, 8)):
        begin = time.monotonic()
        tokens, accepted = generate(engine, part, at_once)
        result[name] = {
            "requests": len(part),
            "at_once": at_once,
            "seconds": round(time.monotonic() - begin, 2),
            "rounds": len(accepted),
            "tokens_per_round": round(1 + sum(accepted) / max(len(accepted), 1), 4),
            "acceptance_per_position": acceptance(accepted),
            "proposes": counts(),
            "tokens": tokens,
        }
        write(asked.out, result)
        print(name, {k: v for k, v in result[name].items() if k != "tokens"}, flush=True)
    if asked.soak:
        try:
            soak(engine, prompts, result["all"]["tokens"], asked.soak, result)
        except Exception:
            result["soak_error"] = traceback.format_exc()
        result["proposes"] = counts()
        write(asked.out, result)
        print("soak", {k: v for k, v in result.get("soak", {}).items() if k != "differing"}, counts(), flush=True)


if __name__ == "__main__":
    main()
