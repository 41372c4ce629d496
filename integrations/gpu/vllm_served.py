# vLLM is not there where types are checked.
# pyright: reportMissingImports=false
"""A load from vLLM's own client (`vllm bench serve`) on a server that runs, which drafts by itself and through
specgraph, in turns.

    python integrations/gpu/shapes_8b.py /tmp/8b
    VLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=1 PYTHONPATH=integrations/gpu vllm serve /tmp/8b/target \
      --load-format dummy --no-enable-prefix-caching --max-model-len 4096 --max-num-seqs 64 \
      --worker-extension-cls vllm_worker.Drafting --additional-config '{"specgraph": {}}' \
      --speculative-config '{"method": "eagle3", "model": "/tmp/8b/drafter", "num_speculative_tokens": 5,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7, 0.49, 0.343, 0.24, 0.168]}'
    python integrations/gpu/vllm_served.py --rates 2,6,10 --out FILE

The server may be any; these flags are those of 8B shapes whose drafts are each accepted with probability 0.7. The two
ways get the same requests: the client's `random` data, or with `--text 200,3400` pieces of Python's own library, of
which the client leaves out those of more than 1,024 tokens. The rows are the client's.
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
    "completed", "failed", "duration", "total_input_tokens", "total_output_tokens", "output_throughput",
    "spec_decode_acceptance_length", *(f"{p}_{what}_ms" for what in ("ttft", "tpot") for p in ("p50", "p99", "mean")),
)  # fmt: skip
"""What a row keeps of the client's result."""


def call_workers(url: str, method: str, *args: str) -> Any:
    """Call a method of `vllm_worker.Drafting` on all ranks; rank 0's answer."""
    body = json.dumps({"method": method, "args": args}).encode()
    request = urllib.request.Request(f"{url}/collective_rpc", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["results"][0]


def load(url: str, rate: float, seconds: float, data: dict[str, Any], seed: int) -> dict[str, Any]:
    """Run vLLM's client for that many seconds of arrivals, with the flags of its prompts."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    flags = data | {
        "base-url": url, "request-rate": rate, "num-prompts": max(1, round(rate * seconds)), "temperature": 0,
        "seed": seed, "percentile-metrics": "ttft,tpot", "metric-percentiles": "50,99",
    }  # fmt: skip
    arguments = [f"--{key}={value}" for key, value in flags.items()]
    return serve.main(parser.parse_args([*arguments, "--ignore-eos", "--disable-tqdm"]))


def main() -> None:
    """Run both ways at each rate, turn by turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", default="2,6,10", help="requests per second")
    parser.add_argument("--lengths", default="64,2048", help="tokens of the shortest and of the longest prompt")
    parser.add_argument("--text", help="characters of the shortest and of the longest prompt, of Python's own library")
    parser.add_argument("--output", type=int, default=128, help="tokens of every answer")
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--first-turn", type=int, default=0, help="turns of an odd number begin with stock")
    asked = parser.parse_args()
    rates, (low, high) = [*map(float, asked.rates.split(","))], map(int, (asked.text or asked.lengths).split(","))
    data: dict[str, Any] = {
        "dataset-name": "random", "random-input-len": (low + high) // 2, "random-output-len": asked.output,
        "random-range-ratio": json.dumps({"input": (high - low) / (high + low), "output": 0.0}),
    }  # fmt: skip
    if asked.text:
        text = Path(tempfile.mkdtemp()) / "text.json"
        python_text(text, round(2 * max(rates) * asked.seconds), (low, high))
        data = {"dataset-name": "sharegpt", "dataset-path": text, "sharegpt-output-len": asked.output}
    result: dict[str, Any] = {"command": " ".join(sys.argv), "environment": environment("vllm"), "rows": []}
    for turn in (-1, *range(asked.first_turn, asked.first_turn + asked.turns)):  # -1: the warm-up
        for rate in rates:
            for way in ("stock", "specgraph") if turn % 2 else ("specgraph", "stock"):
                call_workers(asked.url, "draft_by", way)
                before = Counter(call_workers(asked.url, "proposes"))
                row = load(asked.url, rate, asked.seconds if turn >= 0 else 2, data, turn + 1)
                if turn >= 0:
                    proposes = Counter(call_workers(asked.url, "proposes")) - before
                    row = {key: round(row[key], 3) for key in KEYS if key in row}
                    result["rows"].append({"rate": rate, "way": way, "turn": turn} | row | {"proposes": proposes})
                    print(json.dumps(result["rows"][-1]), flush=True)
                    asked.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
