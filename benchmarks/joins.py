"""What it costs the host that a request joins: whole requests of 16 tokens, 8 at a time, lowering `round`.

    python benchmarks/joins.py --platform cuda --json benchmarks/results/h200-joins.json

Microseconds per request by the clock, over all stretches: least, median, and the value that 9 of 10 are below.
`join` is the whole of it, `prefill` its passes of target and drafter with their uploads, `launch` what follows them,
`wait` the time in which the host waited for the device. `tokens_per_second` is that of the best stretch and of the
median one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

from specgraph import load_generator, open_platform
from specgraph.capture import HostCopy
from specgraph.draft import Drafter
from specgraph.engine.device_rounds import DeviceRounds
from specgraph.engine.round_program import RoundRunner
from specgraph.engine.target import TargetRunner
from specgraph.tools.decoding import PROMPTS

METHODS = (
    (DeviceRounds, "join", "join"), (TargetRunner, "prefill", "prefill of the target"),
    (Drafter, "prefill", "prefill of the drafter"), (RoundRunner, "join", "launch"), (HostCopy, "read", "wait"),
)  # fmt: skip


def watch(found):
    """From now on the time of each call is appended to `found`, by name."""
    for owner, method, name in METHODS:
        real = getattr(owner, method, None)
        if real is None:
            continue

        def timed(*args, real=real, name=name, **options):
            start = time.perf_counter_ns()
            result = real(*args, **options)
            found.setdefault(name, []).append((time.perf_counter_ns() - start) / 1e3)
            return result

        setattr(owner, method, timed)


def spread(values):
    """Least, median and the value that 9 of 10 are below."""
    ordered = sorted(values)
    return [round(each, 1) for each in (ordered[0], statistics.median(ordered), ordered[len(ordered) * 9 // 10])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform")
    parser.add_argument("--requests", type=int, default=8, help="at a time")
    parser.add_argument("--count", type=int, default=200, help="requests of a stretch")
    parser.add_argument("--stretches", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    platform, found, rates, walls = open_platform(asked.platform), {}, [], []
    with load_generator(
        platform=platform, num_speculative_tokens=5, max_num_requests=asked.requests, lowering="round"
    ) as generator:
        requests = [generator.request(PROMPTS[i % len(PROMPTS)], max_tokens=16) for i in range(asked.count)]
        generator.generate(requests[: 4 * asked.requests])
        watch(found)
        for _ in range(asked.stretches):
            start = time.perf_counter()
            tokens = sum(len(each.token_ids) for each in generator.generate(requests))
            walls.append((time.perf_counter() - start) / asked.count * 1e6)
            rates.append(tokens / asked.count / walls[-1] * 1e6)
    report = {
        "command": shlex.join(["python", "benchmarks/joins.py", *sys.argv[1:]]),
        "device": platform.info.device_name,
        "versions": dict(platform.info.versions),
        "requests": asked.requests,
        "tokens_per_second": {"best": round(max(rates), 1), "median": round(statistics.median(rates), 1)},
        "us_per_request": spread(walls),
        "us": {name: spread(values) for name, values in found.items()},
    }
    print(json.dumps(report, indent=1))
    if asked.json is not None:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
