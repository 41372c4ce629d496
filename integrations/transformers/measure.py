"""`generate` with and without the drafter, in turns, with the shipped pair on one CPU thread: speed and acceptance.

Speed is in tokens per second of processor time, which other processes of the machine disturb less than the clock.

    python integrations/transformers/measure.py --out benchmarks/results/cpu-transformers.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from specgraph_transformers import speculative
from transformers import AutoModelForCausalLM, AutoTokenizer

from specgraph import shipped_pair


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--requests", default="1,4")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    target, draft = shipped_pair()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    files = sorted(path for path in Path(sysconfig.get_path("stdlib")).glob("*.py") if path.stat().st_size > 20_000)
    result: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "environment": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
        },
        "pair": "shipped (tiny-python), float32, K = 5", "new_tokens": asked.new_tokens, "rows": [],
    }  # fmt: skip
    for n in (int(n) for n in asked.requests.split(",")):
        texts = [path.read_text(errors="replace")[4000:4600] for path in files[:n]]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        options = {"do_sample": False, "max_new_tokens": asked.new_tokens, "min_new_tokens": asked.new_tokens}
        drafter = speculative(draft, num_speculative_tokens=5, max_num_requests=n)
        ways: dict[str, dict[str, Any]] = {"without": {}, "with": {"custom_generate": drafter}}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        outputs: dict[str, Any] = {}
        for turn in range(asked.turns + 1):  # the first one captures
            for way, more in ways.items():
                begin = time.process_time()
                outputs[way] = model.generate(**inputs, **options, **more)
                if turn:
                    seconds[way].append(time.process_time() - begin)
        assert torch.equal(outputs["without"], outputs["with"])
        for way, taken in seconds.items():
            row = {
                "requests": n,
                "way": way,
                "tokens_per_cpu_s": round(n * asked.new_tokens / statistics.median(taken), 1),
            }
            row["cpu_seconds"] = [round(s, 3) for s in taken]
            if way == "with":
                row["mean_acceptance_length"] = round(drafter.metrics.mean_acceptance_length, 3)
            result["rows"].append(row)
            print(row, flush=True)
        drafter.close()
    asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
