"""A soak of the plugin in SGLang: random arrivals, aborts, radix-cache hits, sampled neighbours; no token may be wrong.

    PYTHONPATH=integrations/gpu python integrations/sglang/gpu/soak.py --seconds 480 --out soak.json

What every prompt continues with is generated first, 64 at once. A finished greedy request whose tokens are others is
judged by the target in float32 (integrations/gpu/judge.py). The file is written every few seconds; `--judge` judges one
of a soak that was ended early.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import K, environment, make_engine, options, proposes, sglang_draft
from judge import Judge, judged
from prompts import soak_prompts

from specgraph import shipped_pair

MAX_LEN, MAX_TOKENS, AT_ONCE = 1024, 256, 48


def room(prompt: list[int]) -> int:
    """The most new tokens that SGLang lets a prompt ask for: it keeps K + 1 positions of the context free."""
    return min(MAX_TOKENS, MAX_LEN - K - 1 - len(prompt))


async def soak(
    engine: Any, prompts: list[list[int]], want: list[list[int]], seconds: float, save: Callable[[dict[str, Any]], None]
) -> None:
    """Add, abort and compare for that long; `save` gets the counts and the requests that differ every 5 s."""
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

    begin = saved = time.monotonic()
    while (running := time.monotonic() < begin + seconds) or live:
        if time.monotonic() > saved + 5:
            saved = time.monotonic()
            counts["seconds"] = round(saved - begin, 1)
            save({"soak": counts, "differing": [[times, *key] for key, times in differing.items()]})
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
    counts["seconds"] = round(time.monotonic() - begin, 1)
    save({"soak": counts, "differing": [[times, *key] for key, times in differing.items()]})


def judge_file(path: Path, target: Path) -> None:
    """Judge a soak's file, in place."""
    result = json.loads(path.read_text())
    differing = {tuple(key): times for times, *key in result.pop("differing")}
    result["soak"] |= judged(Judge(target), result.pop("prompts"), result.pop("want"), differing)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print({name: value for name, value in result["soak"].items() if name != "wrong"}, flush=True)
    print("wrong", result["soak"]["wrong"][:3], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--judge", action="store_true", help="only judge the file of --out")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--way", choices=["stock", "specgraph"], default="specgraph")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--port", type=int, default=33000)
    asked = parser.parse_args()
    target, draft = shipped_pair()
    if asked.judge:
        judge_file(asked.out, target)
        return
    arguments = options(
        str(target), sglang_draft(draft), asked.way, dtype="float16", mem_fraction_static=0.5, port=asked.port,
        page_size=asked.page_size, context_length=MAX_LEN, cuda_graph_bs_decode=[1, 4, 16, 32, 64],
        max_total_tokens=24 * MAX_LEN,  # half of what 48 requests can need: pages are evicted, requests retracted
    )  # fmt: skip
    engine = make_engine(arguments, asked.out)
    print("started", flush=True)
    prompts = [prompt for prompt in soak_prompts(target / "tokenizer.json", MAX_LEN) if room(prompt) > 0]
    params = [{"temperature": 0.0, "max_new_tokens": room(prompt), "ignore_eos": True} for prompt in prompts]
    want = [list(output["output_ids"]) for output in engine.generate(input_ids=prompts, sampling_params=params)]
    result: dict[str, Any] = {"command": " ".join(sys.argv), "environment": environment(), "page_size": asked.page_size}
    result |= {"prompts": prompts, "want": want}

    def save(part: dict[str, Any]) -> None:
        unfinished = asked.out.with_suffix(".part")
        unfinished.write_text(json.dumps(result | part | {"proposes": proposes(asked.out)}))
        unfinished.rename(asked.out)

    engine.loop.run_until_complete(soak(engine, prompts, want, asked.seconds, save))
    judge_file(asked.out, target)
    engine.shutdown()


if __name__ == "__main__":
    main()
