"""Writing a command's JSON to a file, or to standard output for `-`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def write_json(data: Any, to: str) -> None:
    """Write `data`, indented, with a final newline."""
    text = json.dumps(data, indent=2) + "\n"
    if to == "-":
        sys.stdout.write(text)
    else:
        Path(to).write_text(text)
