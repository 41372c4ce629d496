"""The MUSA backend's own code on a real asynchronous GPU, through the simulated torch_musa over torch.cuda.

    SPECGRAPH_MUSA_SIMULATOR=cuda python backends/musa/simulator/over_cuda.py --json FILE

It checks, over many rounds of changing batches, that every lowering drafts what eager drafts, bit for bit, and counts
where the `cpu` platform drafts another token (two devices promise no equal bits); and it times `step` against `merged`.
The exit status is 1 where a lowering drafted something else. No Moore Threads device takes part, and the times say
nothing about one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(p) for p in (ROOT, ROOT / "tests", ROOT / "backends/musa", ROOT / "backends/musa/tests")]

import torch
from draft_on import captured_drafter, make_drafter, on, rounds_for
from specgraph.device.cpu import CpuPlatform
from specgraph.draft import DraftConfig, Drafter, ProposeBatch
from specgraph.tools.shapes import random_head, shape_named

from specgraph_musa.platform import MusaPlatform
from specgraph_musa.policy import Policy
from torch_musa import simulated

LOWERINGS = ("eager", "piecewise", "step", "merged")


def many_rounds(platform: MusaPlatform, kind: str, k: int, rounds: int, host_rounds: int) -> dict[str, Any]:
    """Compare every lowering with eager in every round, and with the cpu platform in the first ones."""
    drafters = {name: make_drafter(platform, name, k, kind) for name in LOWERINGS}
    host = make_drafter(CpuPlatform(), "eager", k, kind)
    batches = rounds_for(host, seed=11)
    different: dict[str, list[int]] = {name: [] for name in LOWERINGS[1:]}
    host_rows = host_different = 0
    with torch.inference_mode():
        for number in range(rounds):
            batch = batches.next()
            moved = on(platform, batch)
            tokens = {name: drafter.propose(moved).token_ids for name, drafter in drafters.items()}
            for name, seen in different.items():
                if not torch.equal(tokens[name], tokens["eager"]):
                    seen.append(number)
            if number < host_rounds:
                expected = host.propose(batch).token_ids
                host_rows += expected.shape[0]
                host_different += int((tokens["eager"].cpu() != expected).any(dim=1).sum())
    for drafter in drafters.values():
        drafter.close()
    return {
        "drafter": kind,
        "k": k,
        "rounds": rounds,
        "rounds_different_from_eager": {name: len(seen) for name, seen in different.items()},
        "first_different_round": {name: seen[0] for name, seen in different.items() if seen},
        "requests_compared_with_cpu": host_rows,
        "requests_different_from_cpu": host_different,
    }


def timed(platform: MusaPlatform, shape: str, k: int, requests: int, context: int) -> dict[str, Any]:
    """Median milliseconds of one propose, by events around 10 of them, for `step` and `merged` in turn."""
    length = context + 2 * (k + 1)
    head = random_head(shape_named(shape), platform.device, torch.bfloat16, length)
    drafters = {
        name: captured_drafter(
            head,
            platform,
            DraftConfig(
                num_speculative_tokens=k,
                max_num_requests=requests,
                max_model_len=length,
                capture_sizes=[requests],
                decode=name,
            ),
        )
        for name in ("step", "merged")
    }
    batch = _batch(drafters["step"], requests, k, context)
    times: dict[str, list[float]] = {name: [] for name in drafters}
    with torch.inference_mode():
        tokens = {name: drafter.propose(batch).token_ids for name, drafter in drafters.items()}
        for _ in range(25):
            for name, drafter in drafters.items():
                inputs = drafter.inputs(requests)
                start, end = platform.event(timing=True), platform.event(timing=True)
                platform.synchronize()
                start.record()
                for _ in range(10):
                    drafter.propose(inputs, copy=False)
                end.record()
                platform.synchronize()
                times[name].append(start.elapsed_time(end) / 10)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for drafter in drafters.values():
        drafter.close()
    return {
        "shape": shape,
        "dtype": "bfloat16",
        "k": k,
        "requests": requests,
        "context": context,
        "median_ms": {name: round(value, 4) for name, value in medians.items()},
        "spread_ms": {name: [round(min(v), 4), round(max(v), 4)] for name, v in times.items()},
        "step_over_merged": round(medians["step"] / medians["merged"], 4),
        "same_tokens": bool(torch.equal(tokens["step"], tokens["merged"])),
    }


def _batch(drafter: Drafter, requests: int, k: int, context: int) -> ProposeBatch:
    g = torch.Generator().manual_seed(5)
    config = drafter.config
    per = -(-config.max_model_len // config.block_size)
    return on(
        drafter.platform,
        ProposeBatch(
            sampled_token_ids=torch.randint(0, 1000, (requests, k + 1), generator=g),
            num_sampled=torch.full((requests,), k + 1, dtype=torch.int32),
            start_positions=torch.full((requests,), context - k - 1),
            aux_hidden=torch.randn(requests * (k + 1), drafter.head.aux_size, generator=g).to(drafter.head.dtype),
            block_table=1 + torch.arange(requests * per, dtype=torch.int32).view(requests, per),
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--host-rounds", type=int, default=300)
    parser.add_argument("--shape", default="eagle3-llama3-8b")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    platform = MusaPlatform(0, Policy(merged="forced"))
    result: dict[str, Any] = {
        "what": (
            "specgraph-musa's code on a SIMULATED torch_musa over torch.cuda. No Moore Threads device took part; times "
            "say nothing about one."
        ),
        "device": platform.info.device_name,
        "device_kind": platform.info.device_kind,
        "versions": dict(platform.info.versions),
        "capabilities": {n: f"{s.level} {s.reason}".strip() for n, s in platform.capabilities.supports().items()},
        "rounds": [],
        "times": [],
    }
    for requests in (1, 8):
        result["times"].append(timed(platform, asked.shape, 5, requests, 1024))
        _write(result, asked.json)
    for kind in ("eagle3", "dflash"):
        result["rounds"].append(many_rounds(platform, kind, 3, asked.rounds, asked.host_rounds))
        _write(result, asked.json)
    result["faults"] = list(simulated.faults)
    _write(result, asked.json)
    print(json.dumps(result, indent=1))
    is_sound = (
        not any(count for rounds in result["rounds"] for count in rounds["rounds_different_from_eager"].values())
        and all(row["same_tokens"] for row in result["times"])
        and not result["faults"]
    )
    sys.exit(0 if is_sound else 1)


def _write(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
