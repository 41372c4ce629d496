"""Writes the tables of `PAGES` from the result files that the pages name.

    python benchmarks/write_tables.py           # after a result file changed
    python benchmarks/write_tables.py --check   # exit status 1 if a page differs from its result files

A comment before each table names its kind and its result file: <!-- propose h200-eagle3-llama3-8b.json -->
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = (
    ROOT / "README.md",
    ROOT / "benchmarks/README.md",
    ROOT / "docs/draft-vocabulary.md",
    ROOT / "docs/integrations/vllm.md",
    ROOT / "docs/integrations/sglang.md",
)
MARKED = re.compile(r"<!-- (\w+) (\S+\.json) -->\n(?:\|.*\n)*")


def markdown(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table in Markdown."""
    head = list(columns)
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def by_requests(rows: Iterable[dict[str, Any]]) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the rows with greedy drafts, by number of requests and then by lowering."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if not row.get("sampled"):
            found.setdefault(row["requests"], {})[row["lowering"]] = row
    return found


def propose(report: dict[str, Any]) -> str:
    """Return the table of a propose's device times, in us."""
    columns = "requests", "floor", "eager, torch ops", "eager, our kernels", "step", "merged"
    rows: list[list[Any]] = []
    for requests, ways in by_requests(report["rows"]).items():
        us = [ways[name]["device_us"] for name in ("eager, torch ops", "eager", "step", "merged")]
        floor, merged = ways["merged"]["floor_us"], us[-1]
        ratios = f"{merged / floor:.2f}", f"{us[0] / merged:.1f}", f"{us[1] / merged:.1f}"
        rows.append([requests, *(f"{time:.0f}" for time in (floor, *us)), *ratios])
    return markdown([*columns, "merged / floor", "torch ops / merged", "eager / merged"], rows)


def rounds(report: dict[str, Any]) -> str:
    """Return the table of tokens per second of whole rounds, by lowering."""
    found = by_requests(report["rounds"])
    names = list(next(iter(found.values())))
    names = [names[-1], *(name for name in names[:-1] if name != "round")]  # the target alone comes first
    rows: list[list[Any]] = []
    for requests, ways in found.items():
        rates = (f"{ways[name]['tokens_per_second']:.0f}" for name in names)
        rows.append([requests, *rates, f"{ways[names[1]]['mean_acceptance_length']:.2f}"])
    return markdown(["requests", "target alone, in graphs", *names[1:], "mean acceptance length"], rows)


def kernels(report: dict[str, Any]) -> str:
    """Return the table of merged proposes and of other kernels with the same bytes and products, in us."""
    names = "kernel_floor_us", "read_us", "library_us", "alone_us", "merged_us"
    rows = [[row["shape"], row["requests"], *(f"{row[n]:.0f}" for n in names), row["ratio"]] for row in report["rows"]]
    columns = "kernels' floor", "only reads", "library", "our kernels alone", "merged", "merged / floor"
    return markdown(["shape", "requests", *columns], rows)


def drafters(report: dict[str, Any]) -> str:
    """Return the table of merged proposes by drafter and device, for each number of requests.

    It has the times in us, and the ratios of the times to both floors.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in report["rows"]:
        if "ratio" in row:
            shape = row["shape"] + (", sampled" if row.get("sampled") else "")
            found.setdefault((shape, row.get("device", report["device"]).split()[1].strip(",")), []).append(row)
    rows: list[list[Any]] = []
    for names, sizes in found.items():
        us = (f"{row['device_us']:.0f}" for row in sizes)
        ratios = (f"{row['ratio']:.2f}" for row in sizes)
        in_turn = (f"{row['device_us'] / row['kernel_floor_us']:.2f}" for row in sizes if "kernel_floor_us" in row)
        rows.append([*names, *map(" / ".join, (us, ratios, in_turn))])
    requests = " / ".join(str(row["requests"]) for row in next(iter(found.values())))
    return markdown(["shape", "device", f"us, {requests} requests", "/ floor", "/ kernels' floor"], rows)


def vocabularies(report: dict[str, Any]) -> str:
    """Return the table of proposes by the rows of the lm_head, greedy and sampled."""
    found: dict[tuple[str, int], dict[tuple[bool, int], float]] = {}
    for row in report["proposes"]:
        found.setdefault((row["shape"], row["rows"]), {})[row["sampled"], row["requests"]] = row["us"]
    sizes, rows = sorted({row["requests"] for row in report["proposes"]}), list[list[Any]]()
    whole: dict[tuple[bool, int], float] = {}
    for (shape, tokens), times in found.items():
        whole = times if not rows or rows[-1][0] != shape else whole
        cells = [" / ".join(f"{times[sampled, n]:.0f}" for n in sizes) for sampled in (False, True)]
        gain = " / ".join(f"{whole[False, n] / times[False, n]:.2f}" for n in sizes)
        rows.append([shape, tokens, *cells, "" if whole is times else gain])
    asked = " / ".join(map(str, sizes))
    return markdown(["shape", "rows", f"greedy, {asked} requests", "sampled", "all rows / these, greedy"], rows)


def peer_rounds(report: dict[str, Any]) -> str:
    """Return the table of rounds and proposes of vLLM and of the lowering `merged`, measured in one run."""
    rows: list[list[Any]] = []
    for requests in sorted({row["requests"] for row in report["rows"]}):
        ways = {row["way"]: row for row in report["rows"] if row["requests"] == requests}
        peer, merged = ways["vllm"], ways["merged"]
        times = [f"{way['round_ms']:.2f}" for way in (peer, merged)]
        named = ("propose_us", "kernels_us"), ("propose_us", "propose_with_hand_over_us", "propose_floor_us")
        proposes = [f"{way[name]:.0f}" for way, names in zip((peer, merged), named, strict=True) for name in names]
        rows.append([requests, *times, f"{100 * (1 - merged['of_vllm']):.0f} %", *proposes])
    columns = "requests", "round, vLLM (ms)", "merged", "merged is below by", "propose, vLLM (us)"
    return markdown((*columns, "its kernels alone", "merged", "with the hand-over", "kernels' floor"), rows)


def engine(report: dict[str, Any]) -> str:
    """Return the table of a host engine's proposes and rounds, stock and with the plugin, in us."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        found.setdefault(row["requests"], {})[row["way"]] = row
    rows: list[list[Any]] = []
    for requests, ways in found.items():
        line: list[Any] = [requests]
        for key in ("propose_device_us", "round_us", "propose_host_us"):
            stock, ours = ways["stock"][key], ways["specgraph"][key]
            line += [f"{stock:.0f}", f"{ours:.0f}", f"{stock / ours:.2f}"]
        rows.append(line)
    names = "propose", "round", "host"
    return markdown(["requests", *(c for n in names for c in (f"{n}, stock", f"{n}, specgraph", "ratio"))], rows)


def cut_engine(report: dict[str, Any]) -> str:
    """Return the table of a host engine's proposes and rounds with all tokens and with a draft vocabulary, in us."""
    ways = list(dict.fromkeys(row["way"] for row in report["rows"]))
    found = {(row["requests"], row["way"]): row for row in report["rows"]}
    rows = [
        [requests, *(f"{found[requests, way][key]:.0f}" for key in ("propose_device_us", "round_us") for way in ways)]
        for requests in dict.fromkeys(row["requests"] for row in report["rows"])
    ]
    return markdown(["requests", *(f"{name}: {way}" for name in ("propose", "round") for way in ways)], rows)


def gains(report: dict[str, Any]) -> str:
    """Return the README's table: the least and the largest gain over all measured sizes, and its cause."""

    def ratios(rows: list[dict[str, Any]], key: str, slow: str, fast: str) -> list[float]:
        """Return the figure of one way over the other's, for each number of requests."""
        found = {
            (row["requests"], row.get("way") or row["lowering"]): row[key] for row in rows if not row.get("sampled")
        }
        return [figure / found[size, fast] for (size, way), figure in found.items() if way == slow]

    def line(what: str, found: list[float], cause: str, digits: int = 2) -> list[str]:
        return [what, *(f"{figure:.{digits}f} x" for figure in (min(found), max(found))), cause]

    def rows_of(name: str) -> list[dict[str, Any]]:
        return json.loads((RESULTS / name).read_text())["rows"]

    def link(name: str) -> str:
        return f"([result](benchmarks/results/{name}))"

    vllm, llama, cpu, smollm2 = (
        "h200-vllm-0.33-eagle3.json", "h200-eagle3-llama3-8b.json", "cpu-propose.json", "h200-smollm2.json",
    )  # fmt: skip
    small, lone = (
        ratios(rows_of(smollm2), "tokens_per_s", way, "vllm") for way in ("specgraph merged", "specgraph alone")
    )
    rows = [
        line(
            f"propose in vLLM 0.33 against vLLM's own, EAGLE-3, 8B shapes, an H200 {link(vllm)}",
            ratios(report["rows"], "propose_device_us", "stock", "specgraph"),
            "our kernels, a first step in the graph, no host between steps",
        ),
        line(
            "a whole round there: the target is most of it",
            ratios(report["rows"], "round_us", "stock", "specgraph"),
            "the shorter propose",
        ),
        line(
            f"one launch against a launch per step {link(llama)}",
            ratios(rows_of(llama), "device_us", "step", "merged"),
            "fewer launches: little, once each step is a graph",
        ),
        line(
            "one launch against the same kernels one by one",
            ratios(rows_of(llama), "device_us", "eager", "merged"),
            "graphs: the host is the limit",
            digits=1,
        ),
        line(
            f"a propose on a CPU against eager {link(cpu)}",
            ratios(rows_of(cpu), "device_us", "eager", "merged"),
            "launches are cheap there",
        ),
        line(
            f"SmolLM2 (135M) against vLLM, tokens per second {link(smollm2)}",
            small,
            f"mostly vLLM's host time: specgraph without drafts has {min(lone):.1f} to {max(lone):.1f} x",
            digits=1,
        ),
    ]
    return markdown(["how much faster", "worst", "best", "comes from"], rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    table.__name__: table
    for table in (propose, rounds, kernels, drafters, vocabularies, peer_rounds, engine, cut_engine, gains)
}


def written(text: str) -> str:
    """Return a page's text with each marked table made anew from its result file."""

    def table(found: re.Match[str]) -> str:
        kind, name = found.groups()
        report = json.loads((RESULTS / name).read_text())
        return f"<!-- {kind} {name} -->\n{TABLES[kind](report)}"

    return MARKED.sub(table, text)


def main() -> None:
    """Write the tables, or compare them with their result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = [page for page in PAGES if written(page.read_text()) != page.read_text()]
    if arguments.check and stale:
        raise SystemExit(f"differ from their result files: {', '.join(str(page.relative_to(ROOT)) for page in stale)}")
    for page in stale:
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()
