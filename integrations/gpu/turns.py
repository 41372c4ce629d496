"""Runs both ways of drafting in turns, under load from a host engine's own client. Both *_served.py scripts use it."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from engines import environment


def options(url: str, first_turn: int, about_first_turn: str) -> argparse.ArgumentParser:
    """Return a parser with the options of both scripts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default=url)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", default="2,6,10", help="requests per second")
    parser.add_argument("--lengths", default="64,2048", help="tokens of the shortest and of the longest prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of every answer")
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--first-turn", type=int, default=first_turn, help=about_first_turn)
    return parser


def run(
    engine: str,
    asked: argparse.Namespace,
    turns: Iterable[tuple[int, Iterable[float]]],
    draft_by: Callable[[str], object],
    proposes: Callable[[], Mapping[str, int]],
    load: Callable[[float, int, int], Mapping[str, Any]],
) -> None:
    """Load the server both ways at each rate, and write each row to `asked.out` as it comes.

    Args:
        turns: the number of each turn and its rates. Turn -1 is a warm-up of 2 s without rows. A turn with an odd
            number begins with stock.
        draft_by: lets the server draft by "stock" or "specgraph" from now on.
        proposes: returns the server's `ProposeCounts.by_reason` so far.
        load: runs the engine's client at a rate, for a number of requests, with a seed. Returns the client's part of
            a row.
    """
    result: dict[str, Any] = {"command": " ".join(sys.argv), "environment": environment(engine), "rows": []}
    for turn, rates in turns:
        for rate in rates:
            count = max(1, round(rate * (asked.seconds if turn >= 0 else 2)))
            for way in ("stock", "specgraph") if turn % 2 else ("specgraph", "stock"):
                draft_by(way)
                before = Counter(proposes())
                row = load(rate, count, turn + 1)
                if turn >= 0:
                    counts = Counter(proposes()) - before
                    result["rows"].append({"rate": rate, "way": way, "turn": turn} | dict(row) | {"proposes": counts})
                    print(json.dumps(result["rows"][-1]), flush=True)
                    asked.out.write_text(json.dumps(result) + "\n")
