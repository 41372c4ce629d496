"""What a draft tree gains over a chain, by the quality of the drafter: the shipped EAGLE-3 head with disturbed weights.

    python examples/tiny-python/tree_gain.py --noise 0,0.1,0.2,0.3,0.4

Gaussian noise is added to each matrix of the head, with the given share of the matrix's own standard deviation. Chains
of K = 5 and trees of 5 steps, top-k 4 and 16 rows then decode the held-out prompts; every output must equal the
target's alone.
"""

import argparse
import json
from pathlib import Path

import torch
from acceptance import EAGLE3, MAX_MODEL_LEN, TARGET, decode, held_out_requests

from specgraph.checkpoints import load_drafter, load_target
from specgraph.device import open_platform
from specgraph.draft import DraftTree

K, TREE = 5, DraftTree(num_steps=5, top_k=4, num_draft_tokens=16)


def main() -> None:
    """Print a row per share of noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cpu", help="NAME or NAME:INDEX")
    parser.add_argument("--noise", default="0,0.1,0.2,0.3,0.4", help="shares of the standard deviation")
    parser.add_argument("--limit", type=int, help="only so many prompts")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    platform = open_platform(arguments.platform)
    target = load_target(TARGET, platform.device, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
    requests = held_out_requests(arguments.limit)
    alone = decode(platform, target, None, requests, K, "eager").token_ids
    rows: list[dict[str, float]] = []
    print("| noise | first drafts accepted | chain of 5 | tree 5, 4, 16 | gain |\n|---|---|---|---|---|", flush=True)
    for noise in map(float, arguments.noise.split(",")):
        head = load_drafter(EAGLE3, target)
        shared = {weight.data_ptr() for weight in target.weights().values()}
        generator = torch.Generator().manual_seed(1)
        for name, weight in head.weights().items():
            if weight.dim() == 2 and name != "rotary" and weight.data_ptr() not in shared:
                drawn = torch.randn(weight.shape, generator=generator).to(weight.device)
                weight += noise * weight.std() * drawn
        runs = [decode(platform, target, head, requests, K, "merged", tree) for tree in (None, TREE)]
        if any(run.token_ids != alone for run in runs):
            raise SystemExit(f"noise {noise}: an output is not the target's")
        chain, tree = (run.metrics.mean_acceptance_length for run in runs)
        first = runs[0].metrics.acceptance_per_position[0]
        rows.append({"noise": noise, "first": first, "chain": chain, "tree": tree})
        print(f"| {noise:g} | {first:.3f} | {chain:.2f} | {tree:.2f} | {tree / chain - 1:.1%} |", flush=True)
        if arguments.json:
            versions = {**platform.info.versions, "device": platform.info.device_name}
            command = (
                f"python examples/tiny-python/tree_gain.py --platform {arguments.platform} --noise {arguments.noise}"
            )
            arguments.json.write_text(json.dumps({"command": command, "versions": versions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
