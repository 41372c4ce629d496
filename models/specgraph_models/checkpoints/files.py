"""Opens the files of a checkpoint folder. Raises CheckpointError unless they are regular files of a plausible size.

A folder comes from the network, so nothing in it is trusted. A name may be a pipe, a device, or a link that leads
nowhere or in a circle. A JSON file may be nested so deeply that the parser gives up.
"""

from __future__ import annotations

import json
import reprlib
import stat
from pathlib import Path
from typing import Any

from specgraph.errors import first_line
from specgraph_models.errors import CheckpointError, how_to_fetch

JSON_LIMIT = 64 << 20
"""Bytes. The largest published index of shards has about 10 MB."""
TOKENIZER_LIMIT = 512 << 20
"""Bytes. Large multilingual tokenizers have about 40 MB."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The beginning of the text file that git leaves in place of a large file until Git LFS fetches it."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 2


def shown(value: object) -> str:
    """Return a value from a file for a message: its repr, cut to a few dozen characters at any depth."""
    return _SHORT.repr(value)


def exists(path: Path) -> bool:
    """Return True if the path has an entry, even a link that leads nowhere. Never raises."""
    try:
        path.lstat()
    except (OSError, ValueError):
        return False
    return True


def listed(folder: Path) -> str:
    """Return the names in a folder for a message: the first eight, and the number of the others."""
    names = sorted(path.name for path in folder.iterdir())
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more if names else "nothing"


def checked_folder(folder: Path) -> Path:
    """Return `folder`. Raises CheckpointError unless it is a directory that can be listed."""
    try:
        if folder.is_dir():
            next(folder.iterdir(), None)
            return folder
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be opened as a folder: {first_line(error)}") from error
    hint = how_to_fetch(folder) or "; give the folder that holds config.json and the weights"
    raise CheckpointError(f"{folder} is not a folder{hint}")


def checked_file(path: Path, limit: int | None = None) -> Path:
    """Return `path`, a regular file or a link to one.

    Raises CheckpointError if it is anything else, a pointer of Git LFS, or larger than `limit` bytes."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        why = "is a link to a file that does not exist" if exists(path) else "cannot be opened"
        reason = getattr(error, "strerror", None) or first_line(error)
        raise CheckpointError(f"{path} {why} ({reason}); fetch the checkpoint again") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file; fetch the checkpoint again")
    if limit is not None and status.st_size > limit:
        raise CheckpointError(f"{path} has {status.st_size} bytes, more than the {limit} that such a file may have")
    if _begins(path, _LFS_POINTER):
        raise CheckpointError(
            f"{path} is a pointer of Git LFS, not the file itself; run `git lfs pull` in the folder, or fetch it again"
        )
    return path


def _begins(path: Path, start: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(start)) == start
    except OSError:
        return False  # the caller that reads the file raises the error


def read_json(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """Return the JSON object in a file of at most `limit` bytes."""
    checked_file(path, limit)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    except (OSError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {first_line(error)}; fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object, holds {type(value).__name__}")
    return value
