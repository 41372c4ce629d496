"""Compares tokens of random rounds as one launch (lowering `round`) with those of verify and propose apart (`merged`).

python benchmarks/random_rounds.py --platform cuda --rounds 2000 --drafter shipped --drafter p-eagle --json FILE

Requests of random prompts, lengths, temperatures and stop tokens arrive while others run, some are cancelled, and not
all have KV blocks. The result counts requests whose tokens or finish reason differ; it is written after every few
rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from python_prompts import PROMPTS
from safetensors.torch import load_file, save_file

from specgraph import load_generator, open_platform
from specgraph.engine import Request
from specgraph.engine.load import shipped_pair

K = 5


def masked_drafter(folder):
    """The shipped EAGLE-3 drafter as a P-EAGLE drafter that was not trained as one: zeros for its masked rows."""
    shipped = shipped_pair()[1]
    config = json.loads((shipped / "config.json").read_text())
    tensors = load_file(shipped / "model.safetensors")
    tensors["mask_hidden"] = torch.zeros_like(tensors["fc.weight"][0])
    save_file(tensors, Path(folder, "model.safetensors"))
    Path(folder, "config.json").write_text(json.dumps({**config, "parallel_drafting": True, "ptd_token_id": 1}))


def compare(platform, least_rounds, draft, seed=0):
    """The shipped target with a drafter, until `least_rounds` rounds were launched; yields what was found so far."""
    ways = {"merged": {"decode": "merged"}, "round": {"decode": "round"}}
    rng, report = random.Random(seed), {"rounds": 0, "requests": 0, "different": 0, "cancelled": 0}
    made = {
        name: load_generator(
            shipped_pair()[0], draft, platform=platform, num_speculative_tokens=K, max_num_requests=4,
            sampled=True, capture_sizes=[4], max_model_len=256, num_blocks=24, block_size=16, **options,
        )
        for name, options in ways.items()
    }  # fmt: skip
    ids = [made["round"].request(prompt, max_tokens=8).prompt_token_ids for prompt in PROMPTS]
    while made["round"].decoder.rounds.num_rounds < least_rounds:
        asked = []
        for _ in range(12):
            prompt = rng.choice(ids)
            asked.append(
                Request(
                    prompt_token_ids=prompt[: rng.randint(1, len(prompt))], max_tokens=rng.randint(1, 60),
                    temperature=rng.choice([0.0, 0.8]), seed=rng.randint(0, 999),
                    stop_token_ids=rng.choice([(), (rng.randint(0, 600),), (5, 11)]),
                )
            )  # fmt: skip
        expected = made["merged"].generate(asked)
        tokens, reasons, order = {}, {}, {}

        def step(tokens=tokens, reasons=reasons):
            for chunk in made["round"].step():
                tokens.setdefault(chunk.request, []).extend(chunk.token_ids)
                if chunk.finish_reason:
                    reasons[chunk.request] = chunk.finish_reason

        for i, request in enumerate(asked):
            order[made["round"].add(request)] = i
            for _ in range(rng.randint(0, 4)):
                step()
            if rng.random() < 0.2:
                report["cancelled"] += made["round"].cancel(rng.choice(list(order)))
        while made["round"].decoder.num_unfinished:
            step()
        for request_id, i in order.items():
            got, wanted = tokens.get(request_id, []), expected[i]
            if reasons[request_id] == "cancelled":
                equal = got == wanted.token_ids[: len(got)]
            else:
                equal = (got, reasons[request_id]) == (wanted.token_ids, wanted.finish_reason)
            report["requests"] += 1
            report["different"] += not equal
        report["rounds"] = made["round"].decoder.rounds.num_rounds
        yield report
    for generator in made.values():
        generator.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default=None)
    parser.add_argument("--rounds", type=int, default=2000, help="least rounds of each drafter")
    parser.add_argument(
        "--drafter", action="append",
        help="shipped, p-eagle (made of the shipped one), or a drafter's folder; shipped by default",
    )  # fmt: skip
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    platform, start = open_platform(asked.platform), time.perf_counter()
    info = platform.info
    report = {"command": " ".join(["python", *sys.argv]), "device": info.device_name, "versions": dict(info.versions)}
    report["drafters"] = {}
    for draft in asked.drafter or ["shipped"]:
        with tempfile.TemporaryDirectory() as folder:
            given = {"shipped": shipped_pair()[1], "p-eagle": folder}.get(draft, draft)
            if draft == "p-eagle":
                masked_drafter(Path(folder))
            for found in compare(platform, asked.rounds, given):
                report["drafters"][Path(draft).name] = found
                report["seconds"] = round(time.perf_counter() - start)
                if asked.json is not None:
                    asked.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{report['seconds']} s {draft}: {found}", flush=True)


if __name__ == "__main__":
    main()
