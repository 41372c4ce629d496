"""One propose of a small drafter in each lowering, for tools that watch memory:

compute-sanitizer --tool memcheck python benchmarks/one_propose.py
"""

from __future__ import annotations

import argparse

import torch

from specgraph.benchmarking.shapes import random_head, shape_named
from specgraph.decoding import allocate_caches
from specgraph.drafting import DraftConfig, Drafter, ProposeBatch
from specgraph.platforms import open_platform


def main() -> None:
    """Three requests in a batch padded to four, one near max_model_len."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--shape", default="eagle3-tiny-python")
    a = parser.parse_args()
    platform, dtype, k, limit = open_platform(a.platform), torch.bfloat16, 5, 200
    head = random_head(shape_named(a.shape), platform.device, dtype, limit)
    tokens = {}
    with torch.inference_mode():
        for lowering in ("eager", "step", "merged"):
            caches = allocate_caches(head.attention_layers, 1 + 4 * 13, 16, dtype, platform.device)
            config = DraftConfig(
                num_speculative_tokens=k, max_num_requests=4, max_model_len=limit, capture_sizes=[4], lowering=lowering
            )
            drafter = Drafter(head, caches, platform, config)
            drafter.capture()
            g = torch.Generator().manual_seed(0)
            batch = ProposeBatch(
                sampled_token_ids=torch.randint(0, 1000, (3, k + 1), generator=g).to(platform.device),
                num_sampled=torch.tensor([1, 3, 6], dtype=torch.int32).to(platform.device),
                start_positions=torch.tensor([0, 95, limit - 7]).to(platform.device),
                aux_hidden=torch.randn(3 * (k + 1), head.aux_size, generator=g).to(platform.device, dtype),
                block_table=(torch.randperm(39, generator=g) + 1).view(3, 13).int().to(platform.device),
            )
            tokens[lowering] = drafter.propose(batch).token_ids
            drafter.close()
    platform.synchronize()
    assert all(torch.equal(tokens["eager"], other) for other in tokens.values()), tokens
    print(f"one propose in {', '.join(tokens)} on {platform.info.device_name}: {tokens['merged'].tolist()}")


if __name__ == "__main__":
    main()
