"""Acceptance of the shipped pair where requests sample: drafts drawn by temperature against greedy ones.

    python examples/tiny-python/sampled_drafts.py

Both are lossless. Prints a table in Markdown: mean acceptance length = 1 + accepted / drafts, by temperature.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import corpus

from specgraph import load_generator

BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cpu", help="NAME or NAME:INDEX")
    parser.add_argument("--temperatures", default="0.3,0.6,1.0")
    parser.add_argument("--limit", type=int, help="only so many prompts")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("-k", type=int, default=5)
    arguments = parser.parse_args()
    prompts = corpus.read_prompts(Path(__file__).parent / "prompts.jsonl")[: arguments.limit]
    print("| temperature | drafts | mean length | rounds |", "|---|---|---|---|", sep="\n")
    for temperature in map(float, arguments.temperatures.split(",")):
        for drafts in ("sampled", "greedy"):
            generator = load_generator(
                platform=arguments.platform, num_speculative_tokens=arguments.k, max_num_requests=BATCH,
                capture_sizes=[BATCH], max_model_len=384, sampled=True, draft_sampling=drafts,
            )  # fmt: skip
            generator.generate(
                [
                    generator.request(
                        prompt["text"], max_tokens=arguments.new_tokens, temperature=temperature, seed=number
                    )
                    for number, prompt in enumerate(prompts)
                ]
            )
            metrics = generator.decoder.metrics
            length = metrics.mean_acceptance_length
            print(f"| {temperature} | {drafts} | {length:.2f} | {metrics.num_drafts} |", flush=True)
            generator.close()


if __name__ == "__main__":
    main()
