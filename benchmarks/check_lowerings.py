"""Do eager, step and merged draft the same tokens, bit for bit, over many rounds of changing batches?

    python benchmarks/check_lowerings.py --platform cuda --shape eagle3-llama3-8b --rounds 2000 --json FILE

Every lowering has its own buffers and KV cache; requests come, go and advance as if by acceptance. Reports the first
difference with its round, and at the end also compares the KV caches.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

from specgraph.benchmarking.shapes import random_head, shape_named
from specgraph.decoding import allocate_caches
from specgraph.drafting import DraftConfig, Drafter, ProposeBatch
from specgraph.platforms import Platform, open_platform

LOWERINGS = ("eager", "step", "merged")


class Round:
    """The state of `slots` request slots; each holds a request of some length, restarted near max_model_len."""

    def __init__(self, slots: int, k: int, max_model_len: int, block_size: int, vocab: int, aux: int, device) -> None:
        self.g = torch.Generator(device=device).manual_seed(0)
        self.host = torch.Generator().manual_seed(0)
        self.k, self.limit, self.vocab, self.aux, self.device = k, max_model_len, vocab, aux, device
        per = -(-max_model_len // block_size)
        self.table = (torch.randperm(slots * per, generator=self.host) + 1).view(slots, per).int().to(device)
        self.num_blocks = slots * per + 1
        self.position = torch.randint(0, max_model_len, (slots,), generator=self.host)
        self.drafts = torch.zeros(slots, k, dtype=torch.int64, device=device)

    def next(self, dtype: torch.dtype) -> tuple[torch.Tensor, ProposeBatch]:
        """The slots of this round, and its batch."""
        n = int(torch.randint(1, self.position.shape[0] + 1, (), generator=self.host))
        slots = torch.randperm(self.position.shape[0], generator=self.host)[:n]
        counts = torch.randint(1, self.k + 2, (n,), generator=self.host)
        starts = self.position[slots]
        over = starts + counts >= self.limit
        starts[over] = torch.randint(0, self.limit // 2, (n,), generator=self.host)[over]
        self.position[slots] = starts + counts
        on_device = slots.to(self.device)
        own = torch.randint(0, self.vocab, (n, 1), generator=self.g, device=self.device)
        batch = ProposeBatch(
            sampled_token_ids=torch.cat([self.drafts[on_device], own], dim=1),
            num_sampled=counts.int().to(self.device),
            start_positions=starts.to(self.device),
            aux_hidden=torch.randn(n * (self.k + 1), self.aux, generator=self.g, device=self.device, dtype=dtype),
            block_table=self.table[on_device],
        )
        return on_device, batch


def check(platform: Platform, shape: str, rounds: int, requests: int, k: int, max_model_len: int, dtype) -> dict:
    """Run, compare, and count."""
    head = random_head(shape_named(shape), platform.device, dtype, max_model_len)
    state = Round(requests, k, max_model_len, 16, shape_named(shape).vocab_size, head.aux_size, platform.device)
    drafters, caches, capture = {}, {}, {}
    for name in LOWERINGS:
        config = DraftConfig(
            num_speculative_tokens=k, max_num_requests=requests, max_model_len=max_model_len, lowering=name
        )
        caches[name] = allocate_caches(head.attention_layers, state.num_blocks, 16, dtype, platform.device)
        drafters[name] = Drafter(head, caches[name], platform, config)
        before, start = platform.memory().reserved, time.perf_counter()
        drafters[name].capture()
        platform.synchronize()
        capture[name] = {
            "seconds": round(time.perf_counter() - start, 2),
            "graphs": drafters[name].graphs.graph_count if drafters[name].graphs else 0,
            "reserved_mib": round((platform.memory().reserved - before) / 2**20, 1),
        }
    sizes = set()
    for number in range(rounds):
        slots, batch = state.next(dtype)
        sizes.add(batch.num_requests)
        tokens = {name: drafter.propose(batch).token_ids for name, drafter in drafters.items()}
        for name in LOWERINGS[1:]:
            if not torch.equal(tokens[name], tokens["eager"]):
                return {"equal": False, "round": number, "lowering": name, "requests": batch.num_requests}
        state.drafts[slots] = tokens["merged"]
    same = all(
        torch.equal(a.key[1:], b.key[1:]) and torch.equal(a.value[1:], b.value[1:])
        for name in LOWERINGS[1:]
        for a, b in zip(caches[name], caches["eager"], strict=True)
    )
    distinct = int(state.drafts.unique().numel())
    for drafter in drafters.values():
        drafter.close()
    return {
        "equal": True, "kv_caches_equal": same, "rounds": rounds, "batch_sizes_seen": len(sizes),
        "distinct_tokens_in_last_drafts": distinct, "capture": capture,
    }  # fmt: skip


def replays(platform: Platform, count: int) -> dict:
    """Reserved memory before and after `count` replays of one merged graph of a tiny head."""
    head = random_head(shape_named("eagle3-tiny-python"), platform.device, torch.bfloat16, 256)
    caches = allocate_caches(head.attention_layers, 17, 16, torch.bfloat16, platform.device)
    config = DraftConfig(num_speculative_tokens=5, max_num_requests=1, max_model_len=256, lowering="merged")
    drafter = Drafter(head, caches, platform, config)
    drafter.capture()
    inputs = drafter.inputs(1)
    drafter.propose(inputs, copy=False)
    platform.synchronize()
    before = platform.memory(), torch.cuda.mem_get_info()[0] if platform.device.type == "cuda" else 0
    start = time.perf_counter()
    for i in range(count):
        drafter.propose(inputs, copy=False)
        if i % 1000 == 0:
            platform.synchronize()
    platform.synchronize()
    after = platform.memory(), torch.cuda.mem_get_info()[0] if platform.device.type == "cuda" else 0
    drafter.close()
    return {
        "replays": count, "seconds": round(time.perf_counter() - start, 1),
        "allocated_growth_bytes": after[0].allocated - before[0].allocated,
        "reserved_growth_bytes": after[0].reserved - before[0].reserved,
        "device_free_change_bytes": after[1] - before[1],
    }  # fmt: skip


def main() -> None:
    """Parse, check, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--shape", default="eagle3-llama3-8b")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--max-model-len", type=int, default=1100)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--replays", type=int, default=0)
    parser.add_argument("--json", default="")
    a = parser.parse_args()
    platform = open_platform(a.platform)
    with torch.inference_mode():
        found = check(platform, a.shape, a.rounds, a.requests, a.k, a.max_model_len, getattr(torch, a.dtype))
        report = {
            "device": platform.info.device_name, "versions": dict(platform.info.versions),
            "command": "python benchmarks/check_lowerings.py " + " ".join(sys.argv[1:]),
            "shape": a.shape, "k": a.k, "dtype": a.dtype, "max_model_len": a.max_model_len, "lowerings": found,
        }  # fmt: skip
        if a.replays:
            report["replays"] = replays(platform, a.replays)
    print(json.dumps(report, indent=1))
    if a.json:
        with open(a.json, "w") as file:
            json.dump(report, file, indent=1)
    if not found["equal"] or not found["kv_caches_equal"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
