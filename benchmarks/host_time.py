"""Host time of `Drafter.propose` by K and batch size, by the way the round is handed over, and of its parts.

    python benchmarks/host_time.py --platform cuda --json h200-host-time.json

Microseconds of the host per call, medians; the device is idle when each call begins. On the `cpu` platform a launch
runs the work itself, so that only the hand-over and the copy mean something there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from specgraph.attention import choose_attention
from specgraph.cli.env import environment
from specgraph.device import Platform, open_platform
from specgraph.draft import DraftConfig
from specgraph.tools.propose import BenchCase, propose_batch
from specgraph.tools.shapes import RandomHead, lone_drafter, random_head, shape_named
from specgraph.tools.timing import host_time


def host_us(platform: Platform, call: Callable[[], Any], repeats: int) -> float:
    """Median microseconds that a call takes the host."""
    return round(statistics.median(host_time(platform, call, repeats=repeats, warmup=20)), 2)


def times(platform: Platform, head: RandomHead, shape: str, requests: int, k: int, repeats: int) -> dict[str, Any]:
    """The row of one K and batch size."""
    attention = choose_attention("auto", platform, head.attention_layers, head.dtype).backend
    case = BenchCase(shape=shape, requests=requests, k=k, context=256)
    config = DraftConfig(
        num_speculative_tokens=k, max_num_requests=requests, max_model_len=512, capture_sizes=[requests],
        block_size=attention.preferred_block_size, decode="merged",
    )  # fmt: skip
    drafter = lone_drafter(platform, head, config, attention)
    batch = propose_batch(head, case, platform.device, config.block_size)
    bound = drafter.bind(replace(batch, **{f.name: getattr(batch, f.name).clone() for f in fields(batch)}))
    drafter.capture()
    into, own = drafter.inputs(requests), drafter.inputs(requests, bound=bound)
    own.num_sampled.copy_(batch.num_sampled)
    drafts = drafter.propose(batch, copy=False)
    same = torch.equal(drafter.propose(batch).token_ids, drafter.propose(own).token_ids)
    found = {
        "requests": requests,
        "k": k,
        "propose": host_us(platform, lambda: drafter.propose(batch), repeats),
        "propose, bound": host_us(platform, lambda: drafter.propose(own), repeats),
        "propose, bound, views": host_us(platform, lambda: drafter.propose(own, copy=False), repeats),
        "bound drafts the same": same,
        "hand-over": host_us(platform, lambda: drafter.round.load(batch, into, False), repeats),
        "launch": host_us(platform, lambda: drafter.propose(into, copy=False), repeats),
        "copy": host_us(platform, drafts.token_ids.clone, repeats),
        "launches per propose": drafter.graphs.graphs_of(drafts.dispatch.descriptor) if drafter.graphs else 0,
    }
    drafter.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform")
    parser.add_argument("--shape", default="eagle3-tiny-128")
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("-k", default="1,3,5,8")
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    shape_named(asked.shape)
    platform = open_platform(asked.platform)
    dtype = torch.float32 if platform.device.type == "cpu" else torch.bfloat16
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        head = random_head(shape_named(asked.shape), platform.device, dtype, 512)
        for requests in map(int, asked.requests.split(",")):
            for k in map(int, asked.k.split(",")):
                rows.append(times(platform, head, asked.shape, requests, k, asked.repeats))
                print(rows[-1], flush=True)
    if asked.json is not None:
        command = shlex.join(["python", "benchmarks/host_time.py", *sys.argv[1:]])
        asked.json.write_text(json.dumps({**environment(platform), "command": command, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
