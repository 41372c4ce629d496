"""Files that a command writes: checked before the work, written after it."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specgraph.errors import ConfigError


def check_output(option: str, to: str | Path | None) -> None:
    """Refuse a file that can't be written. `-` (standard output) and None always can.

    Raises:
        ConfigError: the name is empty, a folder, or in a folder that is not there or may not be written to.
    """
    if to is None or to == "-":
        return
    path = Path(to)
    if not str(to).strip() or path.is_dir():
        raise ConfigError(f"{option} '{to}': give the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {to}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {to}: no permission to write it")


def write_json(data: Any, to: str) -> None:
    """Write `data` as indented JSON to a file, or to standard output for `-`.

    Raises:
        ConfigError: the file can't be written.
    """
    text = json.dumps(data, indent=2) + "\n"
    try:
        if to == "-":
            sys.stdout.write(text)
        else:
            Path(to).write_text(text)
    except OSError as error:
        raise ConfigError(f"{to} can't be written: {error.strerror or error}") from None


def require_matplotlib() -> None:
    """Refuse a plot that can't be drawn, before the work.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install matplotlib")
