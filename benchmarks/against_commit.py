"""Rounds of an earlier commit against today's, in turns in one run: tokens per second and their ratios.

    mkdir old && git archive 0efe31e specgraph backends/cuda | tar x -C old
    python benchmarks/against_commit.py --old old --platform cuda --json FILE

Each commit runs in a process of its own; only one has work at a time. The earlier one runs lowering `merged`, today's
`merged` and `round`. Targets: the shipped pair (requests one after the other), and a 1B Llama's shape with an EAGLE-3
head, random weights and acceptance 0.7, for which the tokens per second are the expected tokens of a round over its
measured time. K = 5.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path

K, ACCEPTANCE, CONTEXT, ROUNDS, STRETCHES = 5, 0.7, 256, 20, 12
WAYS = {"earlier merged": ("old", "merged"), "merged": ("new", "merged"), "round": ("new", "round")}
"""Which commit and lowering, by the name of the way."""


class Worker:
    """One commit in a process of its own."""

    def __init__(self, platform: str, path: str | None) -> None:
        """path: folder of the commit's tree; None takes what this process imports."""
        environment = dict(os.environ)
        if path is not None:
            folders = [path, os.path.join(path, "backends", "cuda"), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(folders)
        command = [sys.executable, "-u", __file__, "--worker", "--platform", platform]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, **what: object) -> dict[str, object]:
        """The answer to one question."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"the process of a commit ended with {self.process.wait()} when asked {what}")


def answers(platform_name: str) -> None:
    """In the process of a commit: read questions, print answers. It uses only what all commits have."""
    import torch

    import specgraph
    from specgraph.device import open_platform

    platform, made = open_platform(platform_name), {}
    with torch.inference_mode():
        for line in sys.stdin:
            what = json.loads(line)
            key = what["target"], what["requests"], what["lowering"]
            if key not in made:
                build = shipped_pair if what["target"] == "shipped pair" else random_pair
                made[key] = build(platform, what["requests"], what["lowering"])
            print(json.dumps({**made[key](), "from": str(Path(specgraph.__file__).parent)}), flush=True)


def shipped_pair(platform, requests, lowering):
    """Times passes over four prompts with 100 tokens each, one request after the other."""
    try:
        from specgraph.engine.load import load_generator
    except ImportError:
        from specgraph.engine.text import load_generator
    from specgraph.tools.decoding import PROMPTS

    generator = load_generator(platform=platform, num_speculative_tokens=K, lowering=lowering)

    def run():
        asked = [generator.request(prompt, max_tokens=100) for prompt in PROMPTS]
        start = time.perf_counter()
        results = [generator.generate([request])[0].token_ids for request in asked]
        seconds = time.perf_counter() - start
        return {"tokens_per_second": sum(map(len, results)) / seconds, "tokens": results}

    return run


def random_pair(platform, requests, lowering):
    """Times stretches of rounds of a batch whose requests all run on."""
    import torch

    from specgraph import decoding, drafting
    from specgraph.tools.rounds import random_target
    from specgraph.tools.shapes import SHAPES, random_head

    dtype = torch.bfloat16 if platform.device.type == "cuda" else torch.float32
    shape = replace(SHAPES["eagle3-llama3-8b"], num_layers=1, hidden_size=2048, intermediate_size=8192, head_dim=64)
    layers, context = 16, CONTEXT
    if platform.device.type == "cpu":  # to try this file
        shape, layers, context = replace(shape, hidden_size=64, intermediate_size=64, vocab_size=256), 2, 32
        shape = replace(shape, num_heads=2, num_kv_heads=2, draft_vocab_size=256)
    length = context + ROUNDS * (STRETCHES + 3) * (K + 1)
    target = random_target(replace(shape, num_layers=layers), platform.device, dtype, length)
    head = random_head(shape, platform.device, dtype, length)
    limits = {
        "num_speculative_tokens": K, "max_num_requests": requests, "max_model_len": length, "capture_sizes": [requests],
        "prefill_sizes": [context], "mode": "FULL_DECODE_ONLY", "synthetic_acceptance": ACCEPTANCE,
    }  # fmt: skip
    attention = None
    if (config_type := getattr(decoding, "EngineConfig", None)) is not None:
        from specgraph.attention import choose_attention

        layers = [*target.attention_layers, *head.attention_layers]
        attention = choose_attention("auto", platform, layers, dtype).backend
        limits["block_size"] = attention.preferred_block_size
    config = (config_type or drafting.DraftConfig)(**limits, lowering=lowering)
    decoder = decoding.SpeculativeDecoder(target, head, platform, config, attention=attention)
    decoder.capture()
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, target.vocab_size, (requests, context), generator=g).tolist()
    stream = decoder.stream([decoding.Request(prompt_token_ids=p, max_tokens=length - context) for p in prompts])

    def rounds(count):
        for _ in range(count * requests):
            next(stream)

    rounds(ROUNDS)
    expected = 1 + sum(accumulate([ACCEPTANCE] * K, mul))

    def run():
        rounds(2)  # what ran ahead while another way was timed
        start = time.perf_counter()
        rounds(ROUNDS)
        seconds = (time.perf_counter() - start) / ROUNDS
        return {"tokens_per_second": requests * expected / seconds, "round_us": seconds * 1e6}

    return run


def compare(workers, cases, repeats, keep):
    """Rows of all ways, medians over `repeats` stretches in random order; the shipped pair's tokens must agree."""
    rows, order = [], random.Random(0)
    for target, requests in cases:
        for name in WAYS:  # load, capture and warm up
            worker, lowering = WAYS[name]
            workers[worker].ask(target=target, requests=requests, lowering=lowering)
        found = {name: [] for name in WAYS}
        for _ in range(repeats):
            for name in order.sample(list(WAYS), len(WAYS)):
                worker, lowering = WAYS[name]
                found[name].append(workers[worker].ask(target=target, requests=requests, lowering=lowering))
        tokens = [answer.get("tokens") for each in found.values() for answer in each]
        rates = {name: statistics.median(a["tokens_per_second"] for a in each) for name, each in found.items()}
        for name, each in found.items():
            row = {"target": target, "requests": requests, "way": name, "tokens_per_second": round(rates[name], 1)}
            row["of_earlier"] = round(rates[name] / rates["earlier merged"], 3)
            if "round_us" in each[0]:
                row["round_us"] = round(statistics.median(answer["round_us"] for answer in each), 1)
            else:
                row["same_tokens"] = all(one == tokens[0] for one in tokens)
                row["fastest"] = round(max(answer["tokens_per_second"] for answer in each), 1)
            rows.append(row)
            print(row, flush=True)
        keep(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="folder of the earlier commit's tree")
    parser.add_argument("--commit", default="0efe31e", help="its name, for the result")
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--cases", default="shipped pair:1,llama-1b:1,llama-1b:8")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        answers(asked.platform)
        return
    from specgraph.cli.env import environment
    from specgraph.device import open_platform

    if asked.repeats > STRETCHES:
        parser.error(f"at most {STRETCHES} repeats")
    platform = open_platform(asked.platform)
    report = {**environment(platform), "command": " ".join(["python", *sys.argv]), "earlier": asked.commit}

    def keep(rows):
        if asked.json is not None:
            asked.json.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")

    workers = {"old": Worker(asked.platform, asked.old), "new": Worker(asked.platform, None)}
    cases = [(name, int(count)) for name, count in (case.split(":") for case in asked.cases.split(","))]
    try:
        compare(workers, cases, asked.repeats, keep)
    finally:
        for worker in workers.values():
            worker.process.stdin.close()
            worker.process.wait()


if __name__ == "__main__":
    main()
