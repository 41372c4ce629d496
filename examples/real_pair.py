"""Runs a real target and its drafter through specgraph, and writes all results into one JSON file to send.

    python examples/real_pair.py Qwen3-8B Qwen3-8B-eagle3 --chat --out real-pair.json

The two folders are on this machine already (docs/a-real-pair.md). Four commands run, each as you would type it: `env`,
`explain` (graphs, memory, lowering), `audit` (lowerings compared bit for bit) and `generate` (text, acceptance, speed
with and without drafts). A command that fails is reported with its message, and the others still run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS = (
    "Write a haiku about graphs.",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that merges two sorted lists.",
    "List five large rivers, with the sea that each flows into.",
    "Translate into French: The train to Lyon leaves at nine.",
    "What is 17 * 23? Show the steps.",
    "Summarise in one sentence: a cache keeps results that were expensive to compute, so that they are computed once.",
    "Write a short letter that declines an invitation.",
)


def run(command: str, *options: str) -> dict[str, Any]:
    """Run a command of specgraph. Return the JSON that it writes, or its last line of text as `failed`."""
    typed = ["specgraph", command, *options]
    print(f"{' '.join(typed)} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "report.json"
        written = [] if command == "env" else ["--json", str(to)]
        done = subprocess.run(
            [sys.executable, "-m", "specgraph_run", command, *options, *written], capture_output=True, text=True
        )
        if done.returncode or (written and not to.exists()):
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            return {"command": typed, "failed": lines[-1]}
        return {"command": typed, "report": json.loads(to.read_text()) if written else done.stdout}


def rows(results: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the lines of the table: a name and its text."""
    table = [(name, f"failed: {each['failed']}") for name, each in results.items() if "failed" in each]
    text = results["generate"].get("report")
    if text is not None:
        shares = "  ".join(f"{share:.0%}" for share in text["acceptance_per_position"] if share is not None)
        alone = text["tokens_per_second_without_drafting"]
        table += [
            ("platform", f"{text['platform']} ({text['device']})"),
            ("lowering", text["lowering"]),
            ("graph launches per propose", f"{text['graph_launches_per_propose']:g}"),
            ("mean acceptance length", f"{text['mean_acceptance_length']:.2f}"),
            ("acceptance per position", shares),
            (
                "tokens/s",
                f"{text['tokens_per_second']:.0f}" + ("" if alone is None else f", without drafts {alone:.0f}"),
            ),
        ]
    if "report" in results["audit"]:
        table.append(("lowerings, bit for bit", "equal"))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder of the target")
    parser.add_argument("draft", help="folder of its drafter")
    parser.add_argument("--out", default="real-pair.json", help="the file to write")
    parser.add_argument("--platform", help="as in the commands; by default the one accelerator of this machine")
    parser.add_argument("-k", default="4", help="draft tokens per verify")
    parser.add_argument("--chat", action="store_true", help="put the prompts into the target's chat template")
    parser.add_argument("--max-tokens", default="200", help="tokens per prompt")
    parser.add_argument("--max-num-requests", default="8", help="prompts that run together")
    given = parser.parse_args()
    place = ["--platform", given.platform] if given.platform else []
    pair = ["--target", given.target, "--draft", given.draft, "-k", given.k, *place]
    audited = [given.draft, "--target", given.target, "-k", given.k, *place]
    batch = ["--max-num-requests", given.max_num_requests]
    results = {"env": run("env"), "explain": run("explain", *pair, *batch), "audit": run("audit", *audited)}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        lines = [json.dumps({"prompt": prompt, "max_tokens": int(given.max_tokens)}) for prompt in PROMPTS]
        prompts.write_text("\n".join(lines))
        chat = ["--chat"] if given.chat else []
        results["generate"] = run("generate", *pair, *batch, *chat, "--prompts", str(prompts))
    Path(given.out).write_text(json.dumps(results, indent=2) + "\n")
    width = max(len(name) for name, _ in rows(results))
    for name, text in rows(results):
        print(f"{name:{width}}  {text}")
    print(f"\nAll of it is in {given.out}.")
    sys.exit(any("failed" in each for each in results.values()))


if __name__ == "__main__":
    main()
