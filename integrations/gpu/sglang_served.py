# SGLang is not there where types are checked.
# pyright: reportMissingImports=false
"""A load from SGLang's own client (`python -m sglang.bench_serving`) on a server that runs, which drafts by itself and
through specgraph, in turns.

    python -m sglang.launch_server --model-path TARGET --speculative-draft-model-path DRAFTER --disable-radix-cache \
      --speculative-algorithm SPECGRAPH --speculative-num-steps 5 --speculative-eagle-topk 1 \
      --speculative-num-draft-tokens 6
    python integrations/gpu/sglang_served.py --rates 5,20,60 --out FILE

Both ways get the same requests at the same times: prompts of Python's own library, or with `--random-ids` of token ids
that mean as little as dummy weights do. The rows are the client's. For 8B shapes whose drafts are each accepted with
probability 0.7 (SGLang draws one number for all requests of a round, with their mean):

    python integrations/gpu/shapes_8b.py /tmp/8b --drafter-weights
    SGLANG_SIMULATE_ACC_LEN=2.94117 SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token python -m sglang.launch_server ... \
      --model-path /tmp/8b/target --load-format dummy --dtype bfloat16 \
      --speculative-draft-model-path /tmp/8b/drafter --speculative-draft-load-format auto
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from engines import environment
from prompts import python_text

KEYS = (
    "completed", "duration", "total_input_tokens", "total_output_tokens", "output_throughput", "accept_length",
    *(f"{p}_{what}_ms" for what in ("ttft", "tpot") for p in ("median", "p99", "mean")),
)  # fmt: skip
"""What a row keeps of the client's result."""


def draft_by(url: str, way: str) -> None:
    """Let the server draft in that way from now on: "stock" or "specgraph"."""
    # Setting a threshold, to what it is, lets SGLang begin anew to count accepted drafts.
    threshold = "speculative_accept_threshold_acc"
    body = {"server_args": {"specgraph": int(way == "specgraph"), threshold: internal_state(url)[threshold]}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/set_internal_state", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        if json.load(answer) != [True]:
            raise SystemExit(f"{url} does not draft by specgraph; start it with --speculative-algorithm SPECGRAPH")


def internal_state(url: str) -> dict[str, Any]:
    """Return what SGLang's scheduler says of itself; `specgraph` counts proposes by who drafted, and why."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        return json.load(answer)["internal_states"][0]


def load(flags: dict[str, Any], out: Path) -> dict[str, Any]:
    """Run SGLang's client with these flags, and return its result."""
    from sglang.benchmark.serving import cli_main

    sys.argv[1:] = [f"--{name}={value}" for name, value in flags.items()] + ["--tokenize-prompt", "--disable-tqdm"]
    cli_main()
    return json.loads(out.read_text().splitlines()[-1])


def main() -> None:
    """Run both ways at each rate, turn by turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", default="2,6,10", help="requests per second")
    parser.add_argument("--lengths", default="64,2048", help="tokens of the shortest and of the longest prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of every answer")
    parser.add_argument("--random-ids", action="store_true")
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--first-turn", type=int, default=-1, help="-1 is the warm-up, at the last rate; 1 goes on")
    asked = parser.parse_args()
    result: dict[str, Any] = {"command": " ".join(sys.argv), "environment": environment("sglang"), "rows": []}
    rates, (low, high) = [*map(float, asked.rates.split(","))], map(int, asked.lengths.split(","))
    folder = Path(tempfile.mkdtemp())
    flags: dict[str, Any] = {
        "backend": "sglang", "base-url": asked.url, "output-file": folder / "rows",
        "dataset-name": "random-ids" if asked.random_ids else "random", "dataset-path": folder / "text",
        "random-input-len": high, "random-output-len": asked.output, "random-range-ratio": low / high,
        # The client would draw the lengths of answers from the same range.
        "extra-request-body": json.dumps(
            {"sampling_params": {"temperature": 0, "max_new_tokens": asked.output, "ignore_eos": True}}
        ),
    }  # fmt: skip
    if not asked.random_ids:
        # The client repeats a piece that has too few tokens.
        python_text(folder / "text", round(max(rates) * asked.seconds) + 1, (5 * high, 5 * high))
    for turn in range(asked.first_turn, asked.turns):
        for rate in rates if turn >= 0 else rates[-1:]:
            for way in ("stock", "specgraph") if turn % 2 else ("specgraph", "stock"):
                draft_by(asked.url, way)
                before = Counter(internal_state(asked.url)["specgraph"])
                count = max(1, round(rate * (asked.seconds if turn >= 0 else 2)))
                row = load(flags | {"request-rate": rate, "num-prompts": count, "seed": turn + 1}, folder / "rows")
                if turn >= 0:
                    counts = Counter(internal_state(asked.url)["specgraph"]) - before
                    row = {key: row[key] for key in KEYS if key in row}
                    result["rows"].append({"rate": rate, "way": way, "turn": turn} | row | {"proposes": counts})
                    print(result["rows"][-1], flush=True)
                    asked.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
