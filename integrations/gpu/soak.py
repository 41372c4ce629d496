"""Soaks a plugin in its host engine with random arrivals, aborts, cached prompts and sampled neighbours.

No greedy token may be wrong.

    python integrations/gpu/soak.py --engine vllm --seconds 480 --out soak.json

The tokens of every prompt are generated first, 64 prompts at once. If a greedy request then ends with other tokens, the
target in float32 judges them (judge.py). `memory_mib` has rows of seconds, host memory and GPU memory. The file is
written every 5 seconds; `--judge` judges the file of a soak that was ended early. `--options` are further arguments of
the engine, such as '{"page_size": 1}' for SGLang.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engines import ENGINES, engine_class, environment
from judge import Judge, judged
from prompts import soak_prompts
from specgraph_run import shipped_pair

MAX_LEN, MAX_TOKENS, AT_ONCE, KV_TOKENS = 1024, 256, 48, 24 * 1024
"""KV_TOKENS is half the tokens that 48 requests can have, so that blocks are evicted and requests preempted."""


def memory() -> tuple[int, int]:
    """Return the host memory of this process and its children, and the GPU memory in use, in MiB."""
    import psutil

    own = psutil.Process()
    free, total = torch.cuda.mem_get_info()
    return sum(each.memory_info().rss for each in (own, *own.children(recursive=True))) >> 20, (total - free) >> 20


def soak(
    engine: Any, prompts: list[list[int]], want: list[list[int]], seconds: float, save: Callable[[dict[str, Any]], None]
) -> None:
    """Add, abort and compare requests for `seconds`. Every 5 s, `save` gets the counts and the requests that differ."""
    draw, serial = random.Random(1), 0
    live: dict[str, tuple[int, int, bool, list[int]]] = {}  # prompt, max_tokens, sampled, tokens so far
    names = ("requests", "sampled", "aborted", "finished_greedy", "greedy_tokens", "steps", "cached_prompt_tokens")
    counts: dict[str, Any] = dict.fromkeys((*names, "requests_with_cached_prompt"), 0) | {"memory_mib": []}
    differing: dict[tuple[int, ...], int] = {}
    begin = saved = time.monotonic()
    while (running := engine.agreed(time.monotonic() < begin + seconds)) or live:
        while running and len(live) < AT_ONCE and draw.random() < 0.3:
            serial += 1
            prompt, sampled = draw.randrange(len(prompts)), draw.random() < 0.15
            limit = draw.randrange(1, min(MAX_TOKENS, engine.room(prompts[prompt])) + 1)
            name = f"request-{serial:09d}"  # all of one length: SGLang aborts by prefix of the name
            engine.start(name, prompts[prompt], limit, serial if sampled else None)
            live[name] = (prompt, limit, sampled, [])
            counts["requests"] += 1
            counts["sampled"] += sampled
        if running and live and draw.random() < 0.03:
            name = draw.choice(sorted(live))
            engine.abort(name)
            del live[name]
            counts["aborted"] += 1
        counts["steps"] += 1
        for name, new, finished, cached in engine.step():
            if name not in live:
                continue
            prompt, limit, sampled, got = live[name]
            got += new
            if not finished:
                continue
            del live[name]
            counts["cached_prompt_tokens"] += cached
            counts["requests_with_cached_prompt"] += cached > 0
            if sampled:
                continue
            counts["finished_greedy"] += 1
            counts["greedy_tokens"] += len(got)
            if got != want[prompt][:limit]:
                key = (prompt, limit, *got)
                differing[key] = differing.get(key, 0) + 1
        if time.monotonic() > saved + 5 or not (running or live):
            saved = time.monotonic()
            counts["seconds"] = round(saved - begin, 1)
            counts["memory_mib"].append([counts["seconds"], *memory()])
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
    """Run a soak and judge its tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--judge", action="store_true", help="only judge the file of --out")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--way", choices=("stock", "specgraph"), default="specgraph")
    parser.add_argument("--options", type=json.loads, default={})
    asked = parser.parse_args()
    target, draft = shipped_pair()
    if not asked.judge:
        make = engine_class(asked.engine).shipped
        engine = make(target, draft, asked.way, "eagle3", KV_TOKENS, **asked.options)
        prompts = [prompt for prompt in soak_prompts(target / "tokenizer.json", MAX_LEN) if engine.room(prompt) > 0]
        want, _ = engine.generate(prompts, 64, MAX_TOKENS)
        result: dict[str, Any] = {"command": " ".join(sys.argv), "environment": environment(asked.engine)}
        result |= {"prompts": prompts, "want": want}

        def save(part: dict[str, Any]) -> None:
            unfinished = asked.out.with_suffix(".part")
            unfinished.write_text(json.dumps(result | part))
            unfinished.rename(asked.out)

        soak(engine, prompts, want, asked.seconds, save)
        whole = json.loads(asked.out.read_text()) | {"proposes": engine.proposes()}
        asked.out.write_text(json.dumps(whole))
        engine.close()
    judge_file(asked.out, target)


if __name__ == "__main__":
    main()
