"""Counts the tokens of a user's own text, and chooses the tokens that a drafter may draft by them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specgraph_models.checkpoints.tokenizer import Tokenizer

from specgraph.errors import ConfigError

TEXTS = (
    "prompt", "text", "content", "completion", "response", "output", "reasoning", "reasoning_content", "question",
    "answer", "instruction", "input", "value",
)  # fmt: skip
"""The keys of JSON objects that hold text. Objects and lists under any key are searched for them."""
IDS = ("tokens", "token_ids")
"""The keys that hold token ids of the target. An object's `text` is not counted beside them."""
_PIECE = 4096
"""The least characters of a text file that are encoded at once, to the end of the line."""
_HELD_OUT = 10


@dataclass(slots=True)
class TokenCounts:
    """The number of times that each token is in a text."""

    whole: Counter[int] = field(default_factory=Counter[int])
    held_out: Counter[int] = field(default_factory=Counter[int])
    """The tokens of every tenth piece, for a share that the list was not counted from."""

    def most_frequent(self, size: int, always: Collection[int], ids: Collection[int]) -> list[int]:
        """Return `size` of the tokens `ids`: those of `always`, then the most frequent, then those of small ids.

        Ids of a byte pair encoding follow the order of its merges, so small ones are more frequent in most texts.
        """
        return _in_order(self.whole, always, ids)[:size]

    def shares(self, sizes: Sequence[int], always: Collection[int], ids: Collection[int]) -> list[tuple[float, float]]:
        """Return, for each size, two shares of the text that as many tokens cover.

        The first is of all text, by the tokens that are counted from it. The second is of every tenth piece, by tokens
        that are counted from the others.
        """
        own, others = _in_order(self.whole, always, ids), _in_order(self.whole - self.held_out, always, ids)
        return [(covered(own[:size], self.whole), covered(others[:size], self.held_out)) for size in sizes]


def count_tokens(paths: Sequence[Path], tokenizer: Tokenizer) -> TokenCounts:
    """Count the tokens of files: text, JSON (`.json`) or JSON lines (`.jsonl`). `-` is text from standard input.

    Raises:
        ConfigError: a file can't be read, or a JSON value holds no text.
    """
    counts, number = TokenCounts(), 0
    for path in paths:
        for piece in _pieces(path):
            ids = piece if isinstance(piece, list) else tokenizer.encode(piece, add_special_tokens=False).ids
            counts.whole.update(ids)
            if number % _HELD_OUT == _HELD_OUT - 1:
                counts.held_out.update(ids)
            number += 1
    if not counts.whole:
        raise ConfigError(f"there is no token to count in {', '.join(map(str, paths))}")
    return counts


def _in_order(counts: Counter[int], always: Collection[int], ids: Collection[int]) -> list[int]:
    known = set(ids)
    by_count = sorted(known & counts.keys(), key=lambda each: (-counts[each], each))
    return list(dict.fromkeys([*sorted(always), *by_count, *sorted(known)]))


def covered(tokens: Collection[int], counts: Counter[int]) -> float:
    """Return the share of a counted text that `tokens` cover; 0 for a text without tokens."""
    kept = set(tokens)
    return sum(count for token, count in counts.items() if token in kept) / max(counts.total(), 1)


def _pieces(path: Path) -> Iterator[str | list[int]]:
    try:
        text = _read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read as text: {error}") from None
    if path.suffix not in (".json", ".jsonl"):
        yield from _parts(text)
        return
    lines = [text] if path.suffix == ".json" else text.split("\n")  # a JSON string may hold other line ends
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = str(path) if path.suffix == ".json" else f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place} is not JSON: {error}") from None
        found = list(_texts(value)) if not isinstance(value, str) else [value]
        if not found:
            raise ConfigError(f"{place} holds no text: give objects with {', '.join(TEXTS[:4])} or {', '.join(IDS)}")
        for each in found:
            yield from [each] if isinstance(each, list) else _parts(each)


def _read(path: Path) -> str:
    if str(path) != "-":
        return path.read_text(encoding="utf-8")
    return sys.stdin.read() if sys.stdin else ""  # sys.stdin is None if it is closed


def _parts(text: str) -> Iterator[str]:
    part: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        part.append(line)
        length += len(line)
        if length >= _PIECE:
            yield "".join(part)
            part, length = [], 0
    if part:
        yield "".join(part)


def _texts(value: Any) -> Iterator[str | list[int]]:
    """Yield the texts and the lists of token ids in a JSON value."""
    if isinstance(value, list):
        for each in value:
            yield from _texts(each)
        return
    if not isinstance(value, dict):
        return
    has_ids = any(_are_ids(value.get(key)) for key in IDS)
    for key, each in value.items():
        if key in IDS and _are_ids(each):
            yield each
        elif isinstance(each, str) and key in TEXTS:
            if not (has_ids and key == "text"):
                yield each
        else:
            yield from _texts(each)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
