"""Does every kind of drafter draft on this platform what it drafts on the CPU, in every lowering?

    python benchmarks/check_kinds.py --platform cuda --json FILE

The tiny-python drafters over the held-out prompts, greedy, float32. On the platform eager, piecewise, step and merged
must give the same tokens, and the target alone at the verify pass's shape the same text. Acceptance must be within 1 %
of the CPU's, which stands in docs/acceptance.md (`python examples/tiny-python/acceptance.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

from specgraph import shipped_pair
from specgraph.checkpoints import load_drafter, load_target
from specgraph.decoding import EngineConfig, Request, SpeculativeDecoder
from specgraph.platforms import Platform, open_platform

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "tiny-python"
LOWERINGS = ("eager", "piecewise", "step", "merged")
MODES = {"eager": "NONE", "piecewise": "PIECEWISE", "step": "FULL_DECODE_ONLY", "merged": "FULL_DECODE_ONLY"}
MAX_MODEL_LEN, BATCH = 384, 8


def on_cpu(path: Path) -> list[tuple[str, int, float]]:
    """(drafter, K, mean acceptance length) of each row of the table; the length from the per-position columns."""
    rows = []
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 4 and cells[2].isdigit():
            k = int(cells[2])
            rows.append((cells[0], k, 1 + sum(float(cell) for cell in cells[4 : 4 + k])))
    return rows


def decode(platform: Platform, target, head, requests: list[Request], k: int, lowering: str) -> tuple[list, float]:
    """The tokens of every request, and the mean acceptance length."""
    config = EngineConfig(
        num_speculative_tokens=k, max_num_requests=BATCH, max_model_len=MAX_MODEL_LEN, capture_sizes=[1, 4, BATCH],
        prefill_sizes=[64, 256], lowering=lowering, mode=MODES[lowering],
    )  # fmt: skip
    with torch.inference_mode():
        decoder = SpeculativeDecoder(target, head, platform, config, query_len=k + 1)
        decoder.capture()
        tokens = [result.token_ids for result in decoder.generate(requests)]
        length = decoder.metrics.mean_acceptance_length if head is not None else 1.0
        decoder.close()
    return tokens, length


def main() -> None:
    """Decode, compare, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--drafters", default="", help="comma-separated; all by default")
    parser.add_argument("--json", default="")
    a = parser.parse_args()
    platform = open_platform(a.platform)
    target_folder, eagle3 = shipped_pair()
    target = load_target(target_folder, platform.device, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
    encoder = Tokenizer.from_file(str(target_folder / "tokenizer.json"))
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[: a.count]
    requests = [
        Request(
            prompt_token_ids=encoder.encode(json.loads(line)["text"]).ids, max_tokens=a.new_tokens, stop_token_ids=(0,)
        )
        for line in lines
    ]
    rows, wrong = [], []
    for name, k, cpu in on_cpu(ROOT / "docs" / "acceptance.md"):
        if a.drafters and name not in a.drafters.split(","):
            continue
        head = load_drafter(eagle3 if name == "eagle3" else EXAMPLE / "drafters" / name, target)
        runs = {lowering: decode(platform, target, head, requests, k, lowering) for lowering in LOWERINGS}
        alone = decode(platform, target, None, requests, k, "merged")[0]
        tokens, length = runs["eager"]
        row = {
            "drafter": name, "k": k, "mean_acceptance_length": round(length, 4), "on_cpu": round(cpu, 3),
            "over_cpu": round(length / cpu, 4),
            "same_in_every_lowering": all(run == runs["eager"] for run in runs.values()),
            "outputs_equal_to_target_alone": sum(x == y for x, y in zip(tokens, alone, strict=True)),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        rows.append(row)
        if not row["same_in_every_lowering"] or abs(row["over_cpu"] - 1) > 0.01 or alone != tokens:
            wrong.append(name)
    report = {
        "device": platform.info.device_name, "versions": dict(platform.info.versions), "dtype": "float32",
        "prompts": len(requests), "new_tokens": a.new_tokens, "lowerings": LOWERINGS,
        "command": "python benchmarks/check_kinds.py " + " ".join(sys.argv[1:]), "rows": rows,
    }  # fmt: skip
    if a.json:
        Path(a.json).write_text(json.dumps(report, indent=1))
    if wrong:
        raise SystemExit(f"not as on the CPU, or not the same in every lowering: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
