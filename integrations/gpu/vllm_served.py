# Types are checked without vLLM.
# pyright: reportMissingImports=false
"""Loads a running server by vLLM's own client (`vllm bench serve`). The server drafts by its own code and through
specgraph, in turns.

    python integrations/gpu/shapes_8b.py 8B
    VLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=1 PYTHONPATH=integrations/gpu vllm serve 8B/target \
      --load-format dummy --no-enable-prefix-caching --max-model-len 4096 --max-num-seqs 64 \
      --worker-extension-cls vllm_worker.Drafting --additional-config '{"specgraph": {}}' \
      --speculative-config '{"method": "eagle3", "model": "8B/drafter", "num_speculative_tokens": 5,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7, 0.49, 0.343, 0.24, 0.168]}'
    python integrations/gpu/vllm_served.py --rates 2,6,10 --out FILE

Any server will do; these flags serve 8B shapes with an acceptance probability of 0.7 per draft token. Both ways get the
same requests: the client's `random` data, or with `--text 200,3400` pieces of Python's own library. The client leaves
out pieces of more than 1,024 tokens. The rows are the client's.
"""

from __future__ import annotations

import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from prompts import python_text
from turns import options, run

KEYS = (
    "completed", "failed", "duration", "total_input_tokens", "total_output_tokens", "output_throughput",
    "spec_decode_acceptance_length", *(f"{p}_{what}_ms" for what in ("ttft", "tpot") for p in ("p50", "p99", "mean")),
)  # fmt: skip
"""The keys of the client's result that a row keeps."""


def call_workers(url: str, method: str, *args: str) -> Any:
    """Call a method of `vllm_worker.Drafting` on all ranks, and return rank 0's answer."""
    body = json.dumps({"method": method, "args": args}).encode()
    request = urllib.request.Request(f"{url}/collective_rpc", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["results"][0]


def load(flags: dict[str, Any]) -> dict[str, Any]:
    """Run vLLM's client with these flags, and return the `KEYS` of its result."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    arguments = [f"--{key}={value}" for key, value in flags.items()]
    result = serve.main(parser.parse_args([*arguments, "--ignore-eos", "--disable-tqdm"]))
    return {key: round(result[key], 3) for key in KEYS if key in result}


def main() -> None:
    """Run both ways at each rate, turn by turn, after a warm-up at each rate."""
    parser = options("http://127.0.0.1:8000", 0, "turns of an odd number begin with stock")
    parser.add_argument("--text", help="characters of the shortest and of the longest prompt, of Python's own library")
    asked = parser.parse_args()
    rates, (low, high) = [*map(float, asked.rates.split(","))], map(int, (asked.text or asked.lengths).split(","))
    flags: dict[str, Any] = {
        "base-url": asked.url, "temperature": 0, "percentile-metrics": "ttft,tpot", "metric-percentiles": "50,99",
    }  # fmt: skip
    if asked.text:
        text = Path(tempfile.mkdtemp()) / "text.json"
        python_text(text, round(2 * max(rates) * asked.seconds), (low, high))
        flags |= {"dataset-name": "sharegpt", "dataset-path": text, "sharegpt-output-len": asked.output}
    else:
        flags |= {
            "dataset-name": "random", "random-input-len": (low + high) // 2, "random-output-len": asked.output,
            "random-range-ratio": json.dumps({"input": (high - low) / (high + low), "output": 0.0}),
        }  # fmt: skip
    run(
        "vllm",
        asked,
        [(turn, rates) for turn in (-1, *range(asked.first_turn, asked.first_turn + asked.turns))],
        draft_by=lambda way: call_workers(asked.url, "draft_by", way),
        proposes=lambda: call_workers(asked.url, "proposes"),
        load=lambda rate, count, seed: load(flags | {"request-rate": rate, "num-prompts": count, "seed": seed}),
    )


if __name__ == "__main__":
    main()
