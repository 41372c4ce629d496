"""Takes the files of docs/writing-a-backend.md out of its text and puts them into a skeleton, as a reader would."""

from __future__ import annotations

import re
from pathlib import Path

BLOCK = re.compile(r"^```python\n# (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(guide: str) -> list[tuple[str, str]]:
    """(file, code) of each block that names its file in the first line."""
    return BLOCK.findall(guide)


def follow(guide: str, folder: Path) -> None:
    """Write every block, in order, under `folder`: one that begins with a docstring is a whole file, any other is added
    to the file that is there."""
    for name, code in blocks(guide):
        path = folder / name
        path.write_text(code if code.startswith('"""') else f"{path.read_text()}\n{code}")
