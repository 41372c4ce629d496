"""A soak of the plugin in SGLang: random arrivals, aborts, radix-cache hits, sampled neighbours; no token may be wrong.

    PYTHONPATH=integrations/gpu python integrations/sglang/gpu/soak.py --seconds 480 --out soak.json

What every prompt continues with is generated first, 64 at once. A finished greedy request whose tokens are others is
judged by the target in float32 (integrations/gpu/judge.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from engine import environment, make_engine, options, proposes, sglang_draft
from judge import Judge, judged
from prompts import soak_prompts

from specgraph import shipped_pair

MAX_LEN, MAX_TOKENS, AT_ONCE = 1024, 256, 48


def room(prompt: list[int]) -> int:
    """The most tokens that SGLang generates after a prompt: it keeps the last two positions of the context free."""
    return max(1, min(MAX_TOKENS, MAX_LEN - 2 - len(prompt)))


async def soak(engine: Any, prompts: list[list[int]], want: list[list[int]], until: float) -> dict[str, Any]:
    """Until a time (`time.monotonic`): adds, aborts and compares."""
    draw, serial = random.Random(1), 0
    names = ("requests", "sampled", "aborted", "finished_greedy", "greedy_tokens", "cached_prompt_tokens")
    counts: dict[str, Any] = dict.fromkeys((*names, "requests_with_cached_prompt"), 0)
    differing: dict[tuple[int, ...], int] = {}
    live: dict[str, asyncio.Task[None]] = {}

    async def request(name: str, prompt: int, limit: int, sampled: bool) -> None:
        params = {"temperature": 1.0 if sampled else 0.0, "max_new_tokens": limit, "ignore_eos": True}
        output = await engine.async_generate(input_ids=prompts[prompt], sampling_params=params, rid=name)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            counts["aborted"] += 1
            return
        got, cached = list(output["output_ids"]), output["meta_info"].get("cached_tokens") or 0
        counts["cached_prompt_tokens"] += cached
        counts["requests_with_cached_prompt"] += cached > 0
        if sampled:
            return
        counts["finished_greedy"] += 1
        counts["greedy_tokens"] += len(got)
        if got != want[prompt][:limit]:
            key = (prompt, limit, *got)
            differing[key] = differing.get(key, 0) + 1

    while (running := time.monotonic() < until) or live:
        for name in [name for name, task in live.items() if task.done()]:
            live.pop(name).result()
        if running and len(live) < AT_ONCE and draw.random() < 0.5:
            serial += 1
            prompt, sampled = draw.randrange(len(prompts)), draw.random() < 0.15
            name = f"request-{serial:09d}"  # SGLang aborts every request whose name begins with the one given
            limit = draw.randrange(1, room(prompts[prompt]) + 1)
            live[name] = asyncio.create_task(request(name, prompt, limit, sampled))
            counts["requests"] += 1
            counts["sampled"] += sampled
        if running and live and draw.random() < 0.03:
            engine.tokenizer_manager.abort_request(rid=draw.choice(sorted(live)))
        await asyncio.sleep(draw.expovariate(500))
    return {"soak": counts, "differing": differing}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--way", choices=["stock", "specgraph"], default="specgraph")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--port", type=int, default=33000)
    asked = parser.parse_args()
    target, draft = shipped_pair()
    arguments = options(
        str(target), sglang_draft(draft), asked.way, dtype="float16", mem_fraction_static=0.5, port=asked.port,
        page_size=asked.page_size, context_length=MAX_LEN, cuda_graph_bs_decode=[1, 4, 16, 32, 64],
        max_total_tokens=24 * MAX_LEN,  # half of what 48 requests can need: pages are evicted, requests retracted
    )  # fmt: skip
    engine = make_engine(arguments, asked.out)
    print("started", flush=True)
    prompts = [p for p in soak_prompts(target / "tokenizer.json", MAX_LEN) if len(p) < MAX_LEN - 6]  # SGLang's limit
    params = [{"temperature": 0.0, "max_new_tokens": room(prompt), "ignore_eos": True} for prompt in prompts]
    want = [list(output["output_ids"]) for output in engine.generate(input_ids=prompts, sampling_params=params)]
    result: dict[str, Any] = {"command": " ".join(sys.argv), "environment": environment(), "page_size": asked.page_size}
    begin = time.monotonic()
    result |= engine.loop.run_until_complete(soak(engine, prompts, want, begin + asked.seconds))
    result["soak"]["seconds"] = round(time.monotonic() - begin, 1)
    result["proposes"] = proposes(asked.out)
    differing = result.pop("differing")
    raw = result | {"differing": [[times, *key] for key, times in differing.items()], "want": want}
    asked.out.write_text(json.dumps(raw))  # before it is judged, so that nothing is lost
    print(result["soak"], result["proposes"], flush=True)
    result["soak"] |= judged(Judge(target), prompts, want, differing)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print({name: value for name, value in result["soak"].items() if name != "wrong"}, flush=True)
    print("wrong", result["soak"]["wrong"][:3], flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
