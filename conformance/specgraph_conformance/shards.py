"""Shards: which part of the suite's cases one run takes, so that a device's time can be split over several runs.

The split follows from the suite's list of cases and the number of shards alone. It is the same on every device, for
every seed and for every selection of cases.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specgraph.errors import ConfigError

from specgraph_conformance.report import Shard
from specgraph_conformance.standard import ATTENTION, Listed, listed_cases

TOGETHER = "collectives"
"""This group stays in one shard: its cases share two processes, and open a second device that others may test."""


def parse_shard(text: str) -> tuple[int, int]:
    """(I, N) of "I/N".

    Raises:
        ConfigError: not two whole numbers with 1 <= I <= N.
    """
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ConfigError(f"shard '{text}' must be I/N, such as 2/3 for the second of three shards")
    return int(index), int(count)


def split(cases: Mapping[str, Listed], count: int) -> dict[str, int]:
    """The shard, from 1, of each case id without parameters.

    All parameter sets of a case are in one shard: on a device they share compiled kernels. Each group is split by
    itself, the cases with the most parameter sets first, each to the shard that has the fewest so far.
    """
    found: dict[str, int] = {}
    loads = dict.fromkeys(range(1, count + 1), 0)
    groups: dict[str, list[str]] = {}
    for id in cases:
        groups.setdefault(id.partition(".")[0], []).append(id)
    for group, ids in groups.items():
        inside, fewest = dict.fromkeys(loads, 0), min(loads, key=lambda s: (loads[s], s))
        for id in sorted(ids, key=lambda id: (-_size(cases[id]), id)):
            shard = fewest if group == TOGETHER else min(loads, key=lambda s: (inside[s], loads[s], s))
            found[id] = shard
            inside[shard] += _size(cases[id])
            loads[shard] += _size(cases[id])
    return found


def shard_of(id: str, shards: Mapping[str, int], count: int) -> int:
    """The shard of a case, with or without parameters; one that is not listed yet goes by its name."""
    name = id.partition("[")[0]
    return shards.get(name) or zlib.crc32(name.encode()) % count + 1


def take(ids: Sequence[str], index: int, count: int, suite: str, options: Mapping[str, Any]) -> Shard:
    """The shard of these cases, in their order; `places` are those of all that it is to run."""
    shards = split(listed_cases(suite) or {}, count)
    mine = [place for place, id in enumerate(ids) if shard_of(id, shards, count) == index]
    return Shard(index, count, len(mine), len(ids), as_ranges(mine), options)


def ran(shard: Shard, planned: Sequence[str], results: Container[str]) -> Shard:
    """The shard with the places of those of its cases that have a result."""
    places = zip(from_ranges(shard.places), planned, strict=True)
    return replace(shard, places=as_ranges(place for place, id in places if id in results))


def as_ranges(places: Iterable[int]) -> str:
    """Whole numbers in ascending order as text: [0, 1, 2, 5] is "0-2 5"."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    return " ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def from_ranges(text: str) -> list[int]:
    """What `as_ranges` was given.

    Raises:
        ValueError: not such a text.
    """
    out: list[int] = []
    for run in text.split():
        first, dash, last = run.partition("-")
        out += range(int(first), int(last if dash else first) + 1)
    return out


def _size(listed: Listed) -> int:
    """Cases of one id, where the device has no attention of its own."""
    return sum(2 if ATTENTION in each else 1 for each in listed.parameters) or 1
