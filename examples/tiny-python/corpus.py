"""The corpus: Python source of the standard library, split by file into a train part and a held-out part."""

import hashlib
import json
import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

HELD_OUT_PERCENT = 6
SKIPPED_FOLDERS = {"site-packages", "lib2to3", "encodings", "pydoc_data", "__pycache__"}
MAX_LINE_LENGTH = 300  # longer lines mark data tables, not code that a person writes
MAX_FILE_BYTES = 400_000
DEFINITION = re.compile(r"^(?: {4})?(?:async def|def|class) \w", re.MULTILINE)


class Source(NamedTuple):
    """One file: its path relative to the standard library's folder, and its text."""

    path: str
    text: str


def default_stdlib() -> Path:
    """The standard library of the running interpreter."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_sources(stdlib: Path) -> list[Source]:
    """Read every module worth learning from, sorted by path, so that the corpus is the same on every machine."""
    sources: list[Source] = []
    for file in sorted(stdlib.rglob("*.py")):
        relative = file.relative_to(stdlib)
        if SKIPPED_FOLDERS & set(relative.parts) or file.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # the standard library tests other encodings with a few files of its own
        if text.strip() and max(map(len, text.splitlines())) <= MAX_LINE_LENGTH and not _is_table(text):
            sources.append(Source(relative.as_posix(), text.replace("\r\n", "\n").replace("\f", "")))
    if not sources:
        raise SystemExit(f"no Python source found under {stdlib}; give --stdlib a folder such as lib/python3.11")
    return sources


def _is_table(text: str) -> bool:
    """True when digits outweigh letters: generated tables teach a language model nothing."""
    return sum(c.isdigit() for c in text) * 2 > sum(c.isalpha() for c in text)


def is_held_out(path: str) -> bool:
    """Split by a hash of the path, so that a file keeps its side when other files come or go."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def split(sources: list[Source]) -> tuple[list[Source], list[Source]]:
    """(train, held out)."""
    return [s for s in sources if not is_held_out(s.path)], [s for s in sources if is_held_out(s.path)]


def definition_starts(text: str) -> list[int]:
    """Offsets of the lines on which a top-level class, a function or a method begins."""
    return [match.start() for match in DEFINITION.finditer(text)]


def read_prompts(file: Path) -> list[dict[str, str]]:
    """Read prompts.jsonl: one object a line with the keys id, text and source."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
