"""A soak of the plugin in vLLM: random arrivals, aborts, prefix-cache hits, sampled neighbours; no token may be wrong.

    export PYTHONPATH=integrations/gpu VLLM_PLUGINS=specgraph
    python integrations/vllm/gpu/soak.py --seconds 480 --out soak.json

What every prompt continues with is generated first, 64 at once. A finished greedy request whose tokens are others is
judged by the target in float32 (integrations/gpu/judge.py).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

from engine import MAX_LEN, environment, generate, make_engine, params, write
from judge import Judge, judged
from prompts import soak_prompts

from specgraph import shipped_pair

MAX_TOKENS, AT_ONCE = 256, 48


def soak(engine: Any, prompts: list[list[int]], want: list[list[int]], until: float, result: dict[str, Any]) -> None:
    """Until a time (`time.monotonic`): adds, aborts and compares. Requests that differ are collected for the judge."""
    draw, serial = random.Random(1), 0
    live: dict[str, tuple[int, int, bool, list[int]]] = {}  # prompt, max_tokens, sampled, tokens so far
    names = ("requests", "sampled", "aborted", "finished_greedy", "greedy_tokens", "steps", "cached_prompt_tokens")
    counts: dict[str, Any] = dict.fromkeys((*names, "requests_with_cached_prompt"), 0)
    differing: dict[tuple[int, ...], int] = {}
    result |= {"soak": counts, "differing": differing}
    while (running := time.monotonic() < until) or live:
        while running and len(live) < AT_ONCE and draw.random() < 0.25:
            serial += 1
            prompt, sampled = draw.randrange(len(prompts)), draw.random() < 0.15
            limit = draw.randrange(1, min(MAX_TOKENS, MAX_LEN - len(prompts[prompt])) + 1)
            sampling = params(limit)
            if sampled:
                sampling.temperature, sampling.seed = 1.0, serial
            engine.add_request(f"s{serial}", {"prompt_token_ids": prompts[prompt]}, sampling)
            live[f"s{serial}"] = (prompt, limit, sampled, [])
            counts["requests"] += 1
            counts["sampled"] += sampled
        if running and live and draw.random() < 0.03:
            name = draw.choice(sorted(live))
            engine.abort_request([name])
            del live[name]
            counts["aborted"] += 1
        counts["steps"] += 1
        for output in engine.step():
            if output.request_id not in live:
                continue
            prompt, limit, sampled, got = live[output.request_id]
            got += output.outputs[0].token_ids
            if not output.finished:
                continue
            del live[output.request_id]
            cached = output.num_cached_tokens or 0
            counts["cached_prompt_tokens"] += cached
            counts["requests_with_cached_prompt"] += cached > 0
            if sampled:
                continue
            counts["finished_greedy"] += 1
            counts["greedy_tokens"] += len(got)
            if got != want[prompt][:limit]:
                key = (prompt, limit, *got)
                differing[key] = differing.get(key, 0) + 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--stock", action="store_true", help="without the plugin's key")
    asked = parser.parse_args()
    target, draft = shipped_pair()
    settings = None if asked.stock else {"capture_sizes": [1, 4, 16, 32, 64], "log_every": 20000}
    engine, speculator = make_engine(
        str(target), str(draft), settings, dtype="float16", max_num_seqs=64, gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=64 << 20,  # 29,000 tokens: blocks are evicted, and requests preempted
    )  # fmt: skip
    prompts = soak_prompts(target / "tokenizer.json", MAX_LEN)
    want, _ = generate(engine, prompts, 64, MAX_TOKENS)
    result: dict[str, Any] = {"command": " ".join(sys.argv), "environment": environment()}
    result["speculator"] = type(speculator).__name__
    begin = time.monotonic()
    soak(engine, prompts, want, begin + asked.seconds, result)
    result["soak"]["seconds"] = round(time.monotonic() - begin, 1)
    result["proposes"] = {} if asked.stock else dict(speculator.counts.by_reason)
    print(result["soak"], result["proposes"], flush=True)
    write(asked.out, result | {"differing": [[times, *key] for key, times in result["differing"].items()]})
    result["soak"] |= judged(Judge(target), prompts, want, result.pop("differing"))
    write(asked.out, result)
    print({name: value for name, value in result["soak"].items() if name != "wrong"}, flush=True)
    print("wrong", result["soak"]["wrong"][:3], flush=True)


if __name__ == "__main__":
    main()
