"""Acceptance of the five drafters on the held-out prompts, in chains and in trees: a table in Markdown.

    python examples/tiny-python/acceptance.py --table docs/acceptance.md
    python examples/tiny-python/acceptance.py eagle3 --temperature 0.6 --draft-sampling greedy

Greedy outputs must equal those of the target alone. Metrics are vLLM's: mean acceptance length = 1 + accepted / drafts;
acceptance at position i = drafts whose token i was accepted / drafts.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from specgraph import load_generator, shipped_pair
from specgraph.checkpoints import drafter_format
from specgraph.engine.text import TextGenerator

HERE = Path(__file__).parent
TARGET, EAGLE3 = shipped_pair()
CHAINS = {"eagle1": (5,), "eagle3": (5,), "mtp": (5,), "draft-model": (5,), "dflash": (5, 7)}
"""K, by drafter."""
TREES = {
    "eagle1": [(5, 4, 16)], "eagle3": [(5, 4, 16), (5, 4, 17), (5, 8, 32)], "mtp": [(5, 4, 16)],
    "draft-model": [(5, 4, 16)], "dflash": [(5, 4, 16), (7, 4, 16)],
}  # fmt: skip
"""Steps, top-k and rows per request in a verify (nodes and the last token), by drafter."""


def loaded(folder: Path, arguments: argparse.Namespace, k: int, **options: Any) -> TextGenerator:
    """Load the target and a drafter for batches of 8."""
    return load_generator(
        TARGET, folder, platform=arguments.platform, dtype="float32", num_speculative_tokens=k, max_num_requests=8,
        capture_sizes=[8], max_model_len=384, sampled=arguments.temperature > 0,
        draft_sampling=arguments.draft_sampling, **options,
    )  # fmt: skip


def generate(generator: TextGenerator, arguments: argparse.Namespace) -> list[list[int]]:
    """Return the tokens after each held-out prompt; the decoder's metrics then say what was accepted."""
    lines = (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[: arguments.limit]
    settings = {"max_tokens": arguments.new_tokens, "temperature": arguments.temperature}
    requests = [generator.request(json.loads(line)["prompt"], seed=i, **settings) for i, line in enumerate(lines)]
    return [result.token_ids for result in generator.generate(requests)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", default=CHAINS, help="all by default")
    parser.add_argument("--platform", default="cpu", help="NAME or NAME:INDEX")
    parser.add_argument("--limit", type=int, help="only so many prompts")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0, help="chains only; each prompt has a seed of its own")
    parser.add_argument("--draft-sampling", default="sampled", help="sampled or greedy")
    parser.add_argument("--table", type=Path, help="put the table in the place of the first one in this file")
    arguments = parser.parse_args()
    rows = [f"| drafter | format found | drafts | mean length | {' | '.join('1234567')} | MiB |", "|" + "---|" * 12]
    alone: dict[int, list[list[int]]] = {}
    shapes: list[tuple[str, int, tuple[int, ...]]] = [
        (name, k, ()) for name in arguments.drafters for k in CHAINS[name]
    ]
    if not arguments.temperature:
        shapes += [(name, tree[0], tree) for name in arguments.drafters for tree in TREES[name]]
    for name, k, tree in shapes:
        folder = EAGLE3 if name == "eagle3" else HERE / "drafters" / name
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        if k not in alone:
            with loaded(folder, arguments, k, speculate=False) as target:
                alone[k] = generate(target, arguments)
        with loaded(folder, arguments, k, **dict(zip(names, tree, strict=False))) as generator:
            if generate(generator, arguments) != alone[k] and not arguments.temperature:
                raise SystemExit(f"{name}, {tree or k}: an output is not the target's")
            metrics = generator.decoder.metrics
        drafts = f"tree {', '.join(map(str, tree))}" if tree else f"{k}"
        rates = [f"{rate:.3f}" for rate in metrics.acceptance_per_position] + [""] * (7 - k)
        cells = [name, str(drafter_format(folder)).split(" (")[0], drafts, f"**{metrics.mean_acceptance_length:.2f}**"]
        size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
        rows.append(f"| {' | '.join([*cells, *rates, f'{size:.2f}'])} |")
        print(rows[-1], f"{metrics.num_drafts} rounds", flush=True)
    if arguments.table:
        table = "".join(f"{row}\n" for row in rows)
        text = re.sub(r"(?:^\|.*\n)+", lambda _: table, arguments.table.read_text(), count=1, flags=re.MULTILINE)
        arguments.table.write_text(text)


if __name__ == "__main__":
    main()
