"""Acceptance on the held-out prompts by category, of the EAGLE-3 head in chains and trees, and of n-gram drafts.

    python examples/smollm2/acceptance.py model.gguf drafters/smollm2/specgraph_smollm2/eagle3 --platform cuda
    ... --json FILE --table docs/acceptance.md

Metrics are vLLM's: mean acceptance length = 1 + accepted / drafts. Greedy outputs are compared with the target's alone.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from specgraph import load_generator
from specgraph.engine.text import TextGenerator

HEADING = "## SmolLM2-135M-Instruct"
"""The table in the page follows it."""
Generated = dict[str, list[list[int]]]
"""The tokens after each prompt, by category."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the GGUF file")
    parser.add_argument("head", type=Path, help="the folder of the EAGLE-3 head")
    parser.add_argument("--platform", default="cpu", help="NAME or NAME:INDEX")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--k", type=int, nargs="*", default=[3, 5, 7])
    parser.add_argument("--kinds", nargs="*", default=["chain", "tree", "ngram"])
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 0.7])
    parser.add_argument("--requests", type=int, default=8, help="decoded at once")
    parser.add_argument("--limit", type=int, help="only so many prompts of each category")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help=f"put the table in the place of the one after '{HEADING}'")
    arguments = parser.parse_args()
    held_out = Path(__file__).parent / "held_out.jsonl"
    prompts = dict[str, list[str]]()
    for line in map(json.loads, held_out.read_text(encoding="utf-8").splitlines()):
        prompts.setdefault(line["category"], []).append(line["prompt"])
    prompts = {category: texts[: arguments.limit] for category, texts in prompts.items()}
    measured = list[dict[str, Any]]()
    with loaded(arguments, 1, sampled=False, speculate=False) as alone:
        wanted, info = generate(alone, prompts, arguments, 0.0)[0], alone.platform.info
    document = {
        "command": " ".join(["python examples/smollm2/acceptance.py", *sys.argv[1:]]), "device": info.device_name,
        "versions": info.versions, "new_tokens": arguments.new_tokens, "top_p": 0.9, "rows": measured,
    }  # fmt: skip
    for kind in arguments.kinds:
        for temperature in arguments.temperatures:
            for k in arguments.k:
                with loaded(arguments, k, sampled=temperature > 0, kind=kind) as generator:
                    texts, counts = generate(generator, prompts, arguments, temperature)
                row: dict[str, Any] = {"drafts": kind, "k": k, "temperature": temperature, **figures(counts)}
                if not temperature:
                    pairs = [(a, b) for name, each in texts.items() for a, b in zip(each, wanted[name], strict=True)]
                    row["equal_to_the_target_alone"] = f"{sum(a == b for a, b in pairs)} of {len(pairs)}"
                measured.append(row)
                print(json.dumps(row), flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.table:
        page = arguments.table.read_text()
        begin = page.index(HEADING)
        changed = re.sub(r"(?:^\|.*\n)+", lambda _: table(measured), page[begin:], count=1, flags=re.MULTILINE)
        arguments.table.write_text(page[:begin] + changed)


def loaded(
    arguments: argparse.Namespace, k: int, *, sampled: bool, kind: str = "chain", **options: Any
) -> TextGenerator:
    """Load the target and the head; a tree has k steps, 4 tokens per node and 16 rows in a verify."""
    if kind == "tree":
        options |= {"speculative_num_steps": k, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
    head = "ngram" if kind == "ngram" else arguments.head
    return load_generator(
        arguments.target, head, platform=arguments.platform, dtype=arguments.dtype, num_speculative_tokens=k,
        max_num_requests=arguments.requests, capture_sizes=[arguments.requests], max_model_len=640, sampled=sampled,
        sampling_parameters=sampled, **options,
    )  # fmt: skip


def generate(
    generator: TextGenerator, prompts: dict[str, list[str]], arguments: argparse.Namespace, temperature: float
) -> tuple[Generated, dict[str, list[int]]]:
    """Return the texts, and by category how many drafts there were and how many were accepted at each position."""
    metrics, texts, counts = generator.decoder.metrics, Generated(), dict[str, list[int]]()
    settings: dict[str, Any] = {"max_tokens": arguments.new_tokens, "temperature": temperature, "chat": True}
    settings |= {"top_p": 0.9} if temperature else {}
    for category, given in prompts.items():
        before = [metrics.num_drafts, *metrics.accepted]
        requests = [generator.request(prompt, seed=seed, **settings) for seed, prompt in enumerate(given)]
        texts[category] = [result.token_ids for result in generator.generate(requests)]
        after = [metrics.num_drafts, *metrics.accepted]
        counts[category] = [new - old for new, old in zip(after, before, strict=True)]
    return texts, counts


def figures(counts: dict[str, list[int]]) -> dict[str, Any]:
    """Return the mean acceptance length by category and over all, and the acceptance at each position over all."""
    counts = counts | {"all": [sum(each) for each in zip(*counts.values(), strict=True)]}
    lengths = {name: round(1 + sum(accepted) / drafts, 3) for name, (drafts, *accepted) in counts.items()}
    drafts, *accepted = counts["all"]
    return {"lengths": lengths, "positions": [round(count / drafts, 3) for count in accepted], "num_drafts": drafts}


def table(measured: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    names = list(measured[0]["lengths"])
    lines = [f"| drafts | K | temperature | {' | '.join(names)} | by position |", "|" + "---|" * (len(names) + 4)]
    for row in measured:
        lengths = [f"{length:.2f}" for length in row["lengths"].values()]
        lengths[-1] = f"**{lengths[-1]}**"
        positions = " ".join(f"{share:.3f}" for share in row["positions"])
        lines.append(f"| {row['drafts']} | {row['k']} | {row['temperature']} | {' | '.join(lengths)} | {positions} |")
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
