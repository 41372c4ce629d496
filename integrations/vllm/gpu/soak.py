"""A soak of the plugin in vLLM: random arrivals, aborts, prefix-cache hits, sampled neighbours; no token may be wrong.

    VLLM_PLUGINS=specgraph python soak.py --seconds 480 --out soak.json

What every prompt continues with is generated first, 64 at once. A finished greedy request whose tokens are others is
judged by the target in float32 (transformers), fed with the very tokens of the request: each token must have the
largest logit, or a near-tie of it. A near-tie is a difference below NEAR_TIE: float16 falls either way there when the
batch has another size. Any other token is wrong, and is listed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from engine import MAX_LEN, environment, generate, make_engine, params, python_prompts, write

from specgraph import shipped_pair

MAX_TOKENS, AT_ONCE, NEAR_TIE = 256, 48, 0.05
"""NEAR_TIE is in nats: the probabilities of two tokens are within a factor of 1.05."""


def prompts_of(tokenizer: Path) -> list[list[int]]:
    """Beginnings of files, the first 60 % of each as a prompt too (prefix-cache hits), and prompts near MAX_LEN."""
    base = python_prompts(tokenizer, 96, seed=1)
    joined = [token for prompt in base for token in prompt]
    near_the_end = [joined[900 * i : 900 * i + MAX_LEN - left] for i, left in enumerate((3, 6, 7, 24, 90))]
    return base + [prompt[: len(prompt) * 6 // 10] for prompt in base] + near_the_end


class Judge:
    """The target in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_float32_matmul_precision("highest")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda()
        self.seen: dict[tuple[int, ...], float] = {}

    def largest_gap(self, prompt: list[int], tokens: list[int]) -> float:
        """The largest difference between the best logit and that of a token, over all tokens, in nats."""
        key = (*prompt, -1, *tokens)
        if key not in self.seen:
            with torch.inference_mode():
                ids = torch.tensor([prompt + tokens], device="cuda")
                logits = self.model(ids).logits[0, len(prompt) - 1 : -1]
                taken = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
            self.seen[key] = float((logits.amax(1) - taken).max())
        return self.seen[key]


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


def judged(prompts: list[list[int]], want: list[list[int]], target: Path, result: dict[str, Any]) -> None:
    """Replace the differing requests by their judgement."""
    judge, differing = Judge(target), result.pop("differing")
    wrong: list[Any] = []
    largest = 0.0
    for (prompt, limit, *got), times in differing.items():
        gap = judge.largest_gap(prompts[prompt], got)
        largest = max(largest, gap)
        if gap >= NEAR_TIE or len(got) != limit:
            wrong.append({"prompt": prompt, "limit": limit, "times": times, "gap": gap, "got": got})
    result["soak"] |= {
        "requests_that_differ": sum(differing.values()),
        "their_largest_gap": round(largest, 4),
        "requests_with_a_wrong_token": sum(entry["times"] for entry in wrong),
    }
    gaps = [judge.largest_gap(prompt, tokens) for prompt, tokens in zip(prompts, want, strict=True)]
    result["generated_before"] = {
        "prompts": len(prompts),
        "tokens": sum(map(len, want)),
        "largest_gap": round(max(gaps), 4),
        "prompts_with_a_wrong_token": sum(gap >= NEAR_TIE for gap in gaps),
    }
    result["near_tie_below"], result["wrong"] = NEAR_TIE, wrong


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
    prompts = prompts_of(target / "tokenizer.json")
    want, _ = generate(engine, prompts, 64, MAX_TOKENS)
    result: dict[str, Any] = {"command": " ".join(sys.argv), "environment": environment()}
    result["speculator"] = type(speculator).__name__
    begin = time.monotonic()
    soak(engine, prompts, want, begin + asked.seconds, result)
    result["soak"]["seconds"] = round(time.monotonic() - begin, 1)
    result["proposes"] = {} if asked.stock else dict(speculator.counts.by_reason)
    print(result["soak"], result["proposes"], flush=True)
    write(asked.out, result | {"differing": [[times, *key] for key, times in result["differing"].items()]})
    judged(prompts, want, target, result)
    write(asked.out, result)
    print({name: value for name, value in result.items() if name != "wrong"}, flush=True)
    print("wrong", result["wrong"][:3], flush=True)


if __name__ == "__main__":
    main()
