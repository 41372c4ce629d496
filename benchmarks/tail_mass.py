"""How often tokens far below the best are drawn, against the softmax: vocabularies of one likely token and 131,072 that
are all 12 to 24 below it, drawn with the noise of draft tokens.

    python benchmarks/tail_mass.py --draws 10000000                    # the reference, compiled: two hours of one core
    python benchmarks/tail_mass.py --draws 100000000 --device cuda     # the Triton kernel: a minute

All vocabularies share a draw's noise: the largest key of the 131,072 tokens at logit 0 is moved by each distance.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time

import torch
from torch import Tensor

from specgraph.ops import noise

TOKENS = 131_072
BELOW = (12, 16, 18, 20, 22, 24)
BLOCK = 4096
"""Columns per program of the kernel. The likely token has a block of its own, so that its key can be read."""


def reference_keys(first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the likely token's key and the largest of the others, of seeds `first` and on: the smallest number's."""
    seeds, zero = torch.arange(first, first + count), torch.tensor(0)
    smallest = _smallest(noise.key(seeds, zero, noise.DRAFT)[:, None], torch.arange(2, TOKENS + 2))
    if not torch.equal(smallest[:2], noise.uniform(seeds[:2], zero, noise.DRAFT, TOKENS + 1)[:, 1:].amin(1)):
        raise SystemExit("the compiled reference gives other numbers than the reference itself: nothing was counted")
    return noise.gumbel(seeds, zero, noise.DRAFT, 1)[:, 0], -torch.log(-torch.log1p(-smallest))


@torch.compile(dynamic=False)
def _smallest(keys: Tensor, ordinals: Tensor) -> Tensor:
    """Return each row's smallest number. The ordinals are an argument: with a range of its own the compiled function
    gave other numbers on a processor with AVX-512 (torch 2.11), a fifth too few of the 131,072 tokens."""
    return noise.numbers(keys, ordinals).amin(1)


def kernel_keys(first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the same from the Triton kernel that draws from stored logits."""
    from specgraph.ops.triton.sampling import pick_kernel

    blocks = TOKENS // BLOCK + 1
    logits = torch.zeros(blocks * BLOCK, device="cuda")
    logits[1:BLOCK] = float("-inf")
    value, top, total = (torch.empty(count, blocks, device="cuda") for _ in range(3))
    seeds = torch.arange(first, first + count, device="cuda")
    pick_kernel[(count, blocks)](
        logits, value, value.new_empty(value.shape, dtype=torch.int32), top, total, torch.ones(count, device="cuda"),
        seeds, torch.zeros_like(seeds), None, blocks * BLOCK, 0, blocks, 1, COLUMNS=BLOCK, OVERLAP=None, num_warps=8,
    )  # fmt: skip
    return value[:, 0], value[:, 1:].amax(1)


def main() -> int:
    """Print the shares; the exit status is 1 where one is more than 3 standard deviations off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first draw, so that processes share a run")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", metavar="FILE", help="write the result")
    asked = parser.parse_args()
    keys, batch = (reference_keys, 500) if asked.device == "cpu" else (kernel_keys, 50_000)
    below = torch.tensor(BELOW, device=asked.device)
    counts, began = torch.zeros(len(BELOW), dtype=torch.int64, device=asked.device), time.perf_counter()
    draws = -(-asked.draws // batch) * batch
    for first in range(asked.first, asked.first + draws, batch):
        likely, other = keys(first, batch)
        counts += (other[:, None] - below > likely[:, None]).sum(0)
    rows = list[dict[str, float]]()
    for distance, count in zip(BELOW, counts.tolist(), strict=True):
        share = TOKENS / (TOKENS + math.exp(distance))
        off = (count - draws * share) / math.sqrt(draws * share * (1 - share))
        rows.append({"below": distance, "expected": draws * share, "drawn": count, "standard_deviations": off})
        print(
            f"{distance} below: {share:.3e} of the softmax, expected {draws * share:.1f}, drawn {count}, {off:+.2f} sd"
        )
    print(f"{draws} draws on {asked.device}, {time.perf_counter() - began:.0f} s")
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump({"command": sys.argv, "draws": draws, "torch": torch.__version__, "rows": rows}, file, indent=1)
    return int(any(abs(row["standard_deviations"]) > 3 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
