"""Acceptance of all five drafters, in chains and in trees, on the held-out prompts: a table in Markdown, and figures.

Greedy, float32, on the CPU or another platform. Every output must equal the target's alone; on the first prompts every
lowering must give the same tokens and counts as eager; another platform must accept what docs/acceptance.md has for the
CPU, within 1 % (not compared with --limit). Metrics are vLLM's: mean acceptance length = 1 + accepted / drafts;
acceptance at position i = drafts whose token i was accepted / drafts.
"""

import argparse
import re
from pathlib import Path
from typing import Any, NamedTuple

import corpus
import figures
import torch
from tokenizers import Tokenizer

from specgraph import shipped_pair
from specgraph.checkpoints import drafter_format, load_drafter, load_target
from specgraph.device import Platform, open_platform
from specgraph.draft import DraftTree
from specgraph.engine import AcceptanceMetrics, EngineConfig, Request, SpeculativeDecoder
from specgraph.models.llama import LlamaTarget
from specgraph.models.protocol import DraftHead, ParallelHead

HERE = Path(__file__).parent
TARGET, EAGLE3 = shipped_pair()
OTHERS = HERE / "drafters"
CHAINS = (("eagle1", 5), ("eagle3", 5), ("mtp", 5), ("draft-model", 5), ("dflash", 5), ("dflash", 7))
"""Drafter and K."""
TREES = (
    ("eagle1", 5, 4, 16), ("eagle3", 5, 4, 16), ("eagle3", 5, 4, 17), ("eagle3", 5, 8, 32), ("mtp", 5, 4, 16),
    ("draft-model", 5, 4, 16), ("dflash", 5, 4, 16), ("dflash", 7, 4, 16),
)  # fmt: skip
"""Drafter, steps, top-k and rows per request in a verify (nodes and the last token)."""
LOWERINGS = ("eager", "piecewise", "step", "merged")
MAX_MODEL_LEN, BATCH = 384, 8


class Run(NamedTuple):
    """Tokens of every request, and what was accepted."""

    token_ids: list[list[int]]
    metrics: AcceptanceMetrics


def held_out_requests(limit: int | None, new_tokens: int = 96) -> list[Request]:
    """A greedy request for each held-out prompt, of the first `limit`."""
    encoder = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [encoder.encode(prompt["text"]).ids for prompt in corpus.read_prompts(HERE / "prompts.jsonl")[:limit]]
    return [Request(prompt_token_ids=ids, max_tokens=new_tokens, stop_token_ids=(0,)) for ids in prompts]


def decode(
    platform: Platform,
    target: LlamaTarget,
    head: DraftHead | ParallelHead | None,
    requests: list[Request],
    k: int,
    lowering: Any,
    tree: DraftTree | None = None,
) -> Run:
    """Generate for all requests, in batches of up to BATCH."""
    config = EngineConfig(
        num_speculative_tokens=k,
        tree=tree,
        max_num_requests=BATCH,
        max_model_len=MAX_MODEL_LEN,
        capture_sizes=[BATCH],
        decode=lowering,
    )
    with torch.inference_mode():
        decoder = SpeculativeDecoder(target, head, platform, config, query_len=k + 1)
        decoder.capture()
        token_ids = [result.token_ids for result in decoder.generate(requests)]
        run = Run(token_ids, decoder.metrics)
        decoder.close()
    return run


def table(rows: list[dict[str, Any]], settings: str) -> str:
    """The document."""
    most = max(row["num_speculative_tokens"] for row in rows)
    lines = [
        "# Acceptance of the tiny-python drafters",
        "",
        settings,
        "",
        f"| drafter | format found | drafts | mean length | {' | '.join(str(i + 1) for i in range(most))} | MiB |",
        "|" + "---|" * (most + 5),
    ]
    for row in rows:
        rates = [f"{rate:.3f}" for rate in row["acceptance_per_position"]]
        cells = [row["drafter"], row["format"], row["drafts"]]
        cells += [f"**{row['mean_acceptance_length']:.2f}**", *rates, *[""] * (most - len(rates)), f"{row['mib']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def on_cpu(document: str) -> dict[tuple[str, str], float]:
    """(drafter, drafts) -> mean acceptance length of each row of a table; from the columns of the positions."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in document.splitlines()]
    rows = [cells for cells in rows if len(cells) > 4 and cells[3].startswith("**")]
    return {(cells[0], cells[2]): 1 + sum(float(cell) for cell in cells[4:-1] if cell) for cells in rows}


def remarks(path: Path) -> str:
    """What somebody wrote below the first table of an earlier document, other tables too; it is kept."""
    text = path.read_text() if path.exists() else ""
    return re.sub(r"\A(?:[^|\n].*\n|\n)*(?:\|.*\n)*", "", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cpu", help="NAME or NAME:INDEX")
    parser.add_argument("--drafter", help="only this one")
    parser.add_argument("--limit", type=int, help="only so many prompts")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--compared", type=int, default=8, help="prompts on which the lowerings are compared")
    parser.add_argument("--table", type=Path, help="write the table to this file; what stands below it is kept")
    parser.add_argument("--figures", type=Path, help="record the figures in this file")
    arguments = parser.parse_args()

    platform = open_platform(arguments.platform)
    kept = HERE.parents[1] / "docs" / "acceptance.md"
    known = {} if platform.info.name == "cpu" or arguments.limit else on_cpu(kept.read_text())
    target = load_target(TARGET, platform.device, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
    requests = held_out_requests(arguments.limit, arguments.new_tokens)
    alone: dict[int, list[list[int]]] = {}
    rows: list[dict[str, Any]] = []
    shapes: list[tuple[str, int, DraftTree | None]] = [(name, k, None) for name, k in CHAINS]
    shapes += [(name, s, DraftTree(num_steps=s, top_k=k, num_draft_tokens=n)) for name, s, k, n in TREES]
    for name, k, tree in shapes if arguments.drafter is None else [s for s in shapes if s[0] == arguments.drafter]:
        folder = EAGLE3 if name == "eagle3" else OTHERS / name
        if k not in alone:
            alone[k] = decode(platform, target, None, requests, k, "eager").token_ids
        head = load_drafter(folder, target)
        first = requests[: arguments.compared]
        runs = {way: decode(platform, target, head, first, k, way, tree) for way in LOWERINGS}
        for way in LOWERINGS[1:]:
            if runs[way] != runs["eager"]:
                raise SystemExit(f"{name}: {way} decodes other tokens or accepts others than eager")
        run = decode(platform, target, head, requests, k, "merged", tree)
        equal = sum(mine == theirs for mine, theirs in zip(run.token_ids, alone[k], strict=True))
        if equal != len(requests):
            raise SystemExit(f"{name}: {len(requests) - equal} of {len(requests)} outputs are not the target's")
        length = run.metrics.mean_acceptance_length
        drafts = str(k) if tree is None else f"tree {k}, {tree.top_k}, {tree.num_draft_tokens}"
        if abs(length / known.get((name, drafts), length) - 1) > 0.01:
            raise SystemExit(f"{name}: mean acceptance length {length:.4f}, on the CPU it is {known[name, drafts]:.4f}")
        rows.append(
            {
                "drafter": name,
                "format": str(drafter_format(folder)).split(" (")[0],
                "num_speculative_tokens": k,
                "drafts": drafts,
                "prompts": len(requests),
                "new_tokens": arguments.new_tokens,
                "rounds": run.metrics.num_drafts,
                "mean_acceptance_length": round(length, 4),
                "acceptance_per_position": [round(rate, 4) for rate in run.metrics.acceptance_per_position],
                "outputs_equal_to_target_only": equal,
                "mib": round(sum(file.stat().st_size for file in folder.iterdir()) / 2**20, 2),
            }
        )
        print(rows[-1], flush=True)

    settings = (
        f"The tiny-python target, {len(requests)} held-out prompts, {arguments.new_tokens} new tokens each, greedy, "
        f"float32 on {'a CPU' if platform.info.name == 'cpu' else platform.info.device_name}.\n"
        "Every output equals the target's alone. On the first "
        f"{min(arguments.compared, len(requests))} prompts {', '.join(LOWERINGS)} give the same tokens and counts.\n"
        "Drafts: K of a chain, or steps, top-k and rows per verify (nodes and the last token) of a tree.\n"
        "Numbered columns are positions: drafts whose token there was accepted / drafts; mean length = 1 + accepted / "
        "drafts.\nTo write it again: `python examples/tiny-python/acceptance.py --table docs/acceptance.md`."
    )
    document = table(rows, settings)
    print(document)
    if arguments.table:
        arguments.table.write_text(document + remarks(arguments.table))
    if arguments.figures:
        figures.record(arguments.figures, "acceptance", {"drafters": rows}, platform.device)


if __name__ == "__main__":
    main()
