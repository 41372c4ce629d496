"""Attention with host lengths against attention with device lengths: the same tokens, and what it costs.

    python benchmarks/host_lengths.py --platform cuda --shape eagle3-llama3-8b --rounds 2000 --json FILE

Drafters with device lengths (eager, merged) and with host lengths (eager, step, merged) draft for the same changing
batches. Every round the tokens of each are compared bit for bit with those of eager with device lengths. Then each
drafter is timed at fixed sizes: per propose on the device (events) and on the host (until propose() returns), in
microseconds, medians, the drafters taking turns. Last, updates of one graph: their time on the host, alone and among
others of one batch, and the memory before and after many.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch

from specgraph import ops
from specgraph.attention import choose_attention
from specgraph.device import Platform, open_platform
from specgraph.draft import DraftConfig, Drafter, ProposeBatch
from specgraph.ops import HostLengths, KVCache, Mask
from specgraph.tools.audit import AuditCase, Traffic
from specgraph.tools.shapes import lone_drafter, random_head, shape_named

WAYS = {
    "device eager": ("device", "eager"),
    "device merged": ("device", "merged"),
    "host eager": ("host", "eager"),
    "host step": ("host", "step"),
    "host merged": ("host", "merged"),
}
MAX_MODEL_LEN, BLOCK = 1100, 16


def propose(drafter: Drafter, batch: ProposeBatch, host: Mapping[str, list[int]]) -> torch.Tensor:
    """Draft, with the batch's positions and counts as Python integers too, as an engine with a host round has them."""
    return drafter.propose(batch, **host).token_ids


def host_values(batch: ProposeBatch) -> dict[str, list[int]]:
    """Arguments of `propose`."""
    return {
        "host_start_positions": batch.start_positions.tolist(),
        "host_num_sampled": batch.num_sampled.tolist(),
    }


def compare(drafters: dict[str, Drafter], traffic: Traffic, rounds: int) -> dict[str, object]:
    """Draft for `rounds` batches with every drafter; stop at the first token that is not device eager's."""
    total = 0
    for number in range(rounds):
        slots, _, batch = traffic.next()
        host = host_values(batch)
        tokens = {name: propose(drafter, batch, host) for name, drafter in drafters.items()}
        wanted = tokens["device eager"]
        for name, found in tokens.items():
            if not torch.equal(found, wanted):
                return {
                    "equal": False, "round": number, "way": name, "requests": batch.num_requests,
                    "other_tokens": int((found != wanted).sum()),
                }  # fmt: skip
        total += wanted.numel()
        traffic.drafts[slots.to(wanted.device)] = wanted
    return {"equal": True, "rounds": rounds, "batch_sizes_seen": len(traffic.sizes), "tokens": total}


def times(platform: Platform, drafters: dict[str, Drafter], traffic: Traffic, requests: int) -> dict[str, object]:
    """Medians over 60 proposes of each drafter, in microseconds, and the calls of one propose."""
    while True:
        _, _, batch = traffic.next()
        if batch.num_requests >= requests:
            break
    fields = ("sampled_token_ids", "num_sampled", "start_positions", "block_table")
    cut = {name: getattr(batch, name)[:requests] for name in fields}
    aux = batch.aux_hidden[: requests * (traffic.case.num_speculative_tokens + 1)]
    batch = ProposeBatch(**cut, aux_hidden=aux)
    values = host_values(batch)
    device, host = {name: [] for name in drafters}, {name: [] for name in drafters}
    for turn in range(70):
        for name, drafter in drafters.items():
            start, end = platform.event(timing=True), platform.event(timing=True)
            platform.synchronize()
            start.record()
            begun = time.perf_counter_ns()
            propose(drafter, batch, values)
            spent = time.perf_counter_ns() - begun
            end.record()
            platform.synchronize()
            if turn >= 10:
                device[name].append(start.elapsed_time(end) * 1e3)
                host[name].append(spent / 1e3)
    found = {}
    for name, drafter in drafters.items():
        before, launches = platform.counts().get("task_updates", 0), drafter.launches["propose"]
        propose(drafter, batch, values)
        found[name] = {
            "device_us": round(statistics.median(device[name]), 1),
            "host_us": round(statistics.median(host[name]), 1),
            "updates": platform.counts().get("task_updates", 0) - before,
            "launches": drafter.launches["propose"] - launches,
        }
    return found


def update_costs(platform: Platform, updates: int, groups: int = 8) -> dict[str, object]:
    """Host time of one update of a graph with that many task groups, in microseconds, and memory over many updates.

    An op with host values sets parameters only; any other op (here a product with a Python number) is captured again.

    Args:
        updates: of each kind, made in batches while the memory is watched.
    """
    device, dtype = platform.device, torch.bfloat16
    query, cache = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((8, 8, 128), (65, 16, 2, 128)))
    table = torch.arange(1, 65, dtype=torch.int32, device=device).view(8, 8)
    out = [torch.empty_like(query) for _ in range(groups)]

    def attend(group: int, value: int) -> None:
        lengths = HostLengths([1] * 8, [1 + value % 100] * 8)
        ops.paged_attention_host(query, KVCache(cache, cache), table, lengths, Mask(), scale=0.1, out=out[group])

    def scale(group: int, value: int) -> None:
        out[group].copy_(query * float(value))

    found: dict[str, object] = {}
    works: dict[str, Callable[[int, int], None]] = {"host values": attend, "captured again": scale}
    for name, work in works.items():
        work(0, 1)
        graph = platform.graph()
        with graph.capture():
            captured = []
            for i in range(groups):
                with platform.task_group() as group:
                    work(i, 1)
                captured.append(group)

        def replay(turn: int, batched: bool, captured=captured, work=work, graph=graph) -> float:
            begun = time.perf_counter_ns()
            with platform.batch_task_updates() if batched else nullcontext():
                for i, group in enumerate(captured):
                    with platform.task_update(group):
                        work(i, turn)
            spent = (time.perf_counter_ns() - begun) / 1e3 / groups
            graph.replay()
            return spent

        about: dict[str, object] = {}
        for how in ("one by one", "in one batch"):
            spent = [replay(turn, how == "in one batch") for turn in range(300)]
            about[f"host_us, {how}"] = round(statistics.median(spent), 1)
        platform.synchronize()
        before, free = platform.memory(), torch.cuda.mem_get_info()[0]
        for turn in range(-(-updates // groups)):
            replay(turn, True)
            if turn % 1000 == 0:
                platform.synchronize()
        platform.synchronize()
        after = platform.memory()
        found[name] = about | {
            "updates": -(-updates // groups) * groups,
            "allocated_growth_bytes": after.allocated - before.allocated,
            "reserved_growth_bytes": after.reserved - before.reserved,
            "device_free_change_bytes": torch.cuda.mem_get_info()[0] - free,
        }
        graph.close()
    return found


def main() -> None:
    """Parse, run, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--shape", default="eagle3-llama3-8b")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--updates", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    platform, dtype = open_platform(a.platform), torch.bfloat16
    with torch.inference_mode():
        shape = shape_named(a.shape)
        head = random_head(shape, platform.device, dtype, MAX_MODEL_LEN)
        case = AuditCase(
            max_num_requests=a.requests, num_speculative_tokens=a.k, max_model_len=MAX_MODEL_LEN, block_size=BLOCK,
            vocab_size=shape.vocab_size,
        )  # fmt: skip
        traffic = Traffic(case, head.aux_size, dtype, platform.device)
        drafters: dict[str, Drafter] = {}
        for name, (attention, lowering) in WAYS.items():
            config = DraftConfig(
                num_speculative_tokens=a.k,
                max_num_requests=a.requests,
                max_model_len=MAX_MODEL_LEN,
                decode=lowering,
            )
            drafters[name] = lone_drafter(platform, head, config, choose_attention(attention, platform).backend)
            drafters[name].capture()
        tokens = compare(drafters, traffic, a.rounds)
        report = {
            "device": platform.info.device_name,
            "versions": dict(platform.info.versions),
            "command": "python benchmarks/host_lengths.py " + " ".join(sys.argv[1:]),
            "shape": a.shape,
            "k": a.k,
            "tokens": tokens,
            "one_update": update_costs(platform, a.updates),
            "times": {str(n): times(platform, drafters, traffic, n) for n in (1, 8, a.requests)},
        }
        for drafter in drafters.values():
            drafter.close()
    print(json.dumps(report, indent=1))
    if a.json:
        a.json.write_text(json.dumps(report, indent=1) + "\n")
    if not tokens["equal"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
