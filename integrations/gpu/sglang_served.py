# Types are checked without SGLang.
# pyright: reportMissingImports=false
"""Loads a running server by SGLang's own client (`python -m sglang.bench_serving`). The server drafts by its own code
and through specgraph, in turns.

    python -m sglang.launch_server --model-path TARGET --speculative-draft-model-path DRAFTER --disable-radix-cache \
      --speculative-algorithm SPECGRAPH --speculative-num-steps 5 --speculative-eagle-topk 1 \
      --speculative-num-draft-tokens 6
    python integrations/gpu/sglang_served.py --rates 5,20,60 --out FILE

Both ways get the same requests at the same times. Prompts come from Python's own library; with `--random-ids`, which
suits dummy weights, they are random token ids. The rows are the client's. The following commands serve 8B shapes with
an acceptance probability of 0.7 per draft token (SGLang draws one number for all requests of a round, with that mean):

    python integrations/gpu/shapes_8b.py 8B --drafter-weights
    SGLANG_SIMULATE_ACC_LEN=2.94117 SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token python -m sglang.launch_server ... \
      --model-path 8B/target --load-format dummy --dtype bfloat16 \
      --speculative-draft-model-path 8B/drafter --speculative-draft-load-format auto
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from prompts import python_text
from turns import options, run

KEYS = (
    "completed", "duration", "total_input_tokens", "total_output_tokens", "output_throughput", "accept_length",
    *(f"{p}_{what}_ms" for what in ("ttft", "tpot") for p in ("median", "p99", "mean")),
)  # fmt: skip
"""The keys of the client's result that a row keeps."""


def draft_by(url: str, way: str) -> None:
    """Let the server draft by "stock" or "specgraph" from now on."""
    # Setting a threshold to its own value resets SGLang's counts of accepted drafts.
    threshold = "speculative_accept_threshold_acc"
    body = {"server_args": {"specgraph": int(way == "specgraph"), threshold: internal_state(url)[threshold]}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/set_internal_state", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        if json.load(answer) != [True]:
            raise SystemExit(f"{url} does not draft by specgraph; start it with --speculative-algorithm SPECGRAPH")


def internal_state(url: str) -> dict[str, Any]:
    """Return the internal state of SGLang's scheduler. Its key `specgraph` has `ProposeCounts.by_reason`."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        return json.load(answer)["internal_states"][0]


def load(flags: dict[str, Any]) -> dict[str, Any]:
    """Run SGLang's client with these flags, and return the `KEYS` of its result."""
    from sglang.benchmark.serving import cli_main

    sys.argv[1:] = [f"--{name}={value}" for name, value in flags.items()] + ["--tokenize-prompt", "--disable-tqdm"]
    cli_main()
    result = json.loads(flags["output-file"].read_text().splitlines()[-1])
    return {key: result[key] for key in KEYS if key in result}


def main() -> None:
    """Run both ways at each rate, turn by turn."""
    parser = options("http://127.0.0.1:30000", -1, "-1 is the warm-up, at the last rate; 1 goes on")
    parser.add_argument("--random-ids", action="store_true")
    asked = parser.parse_args()
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
    run(
        "sglang",
        asked,
        [(turn, rates if turn >= 0 else rates[-1:]) for turn in range(asked.first_turn, asked.turns)],
        draft_by=lambda way: draft_by(asked.url, way),
        proposes=lambda: internal_state(asked.url)["specgraph"],
        load=lambda rate, count, seed: load(flags | {"request-rate": rate, "num-prompts": count, "seed": seed}),
    )


if __name__ == "__main__":
    main()
