"""The exception for checkpoint folders, and how to get one that is missing."""

from __future__ import annotations

import re
from pathlib import Path

from specgraph.errors import SpecgraphError

__all__ = ["CheckpointError"]


class CheckpointError(SpecgraphError):
    """A checkpoint folder is missing a file or tensor, is truncated, or does not fit its target.

    The message is always one line of at most MESSAGE_LIMIT characters: white space is collapsed, unprintable characters
    are escaped, and the middle of a longer message is left out.
    """

    MESSAGE_LIMIT = 400

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        if len(line) > self.MESSAGE_LIMIT:
            half = self.MESSAGE_LIMIT // 2 - 2
            line = f"{line[:half]} .. {line[-half:]}"
        super().__init__(line)


def how_to_fetch(folder: Path) -> str:
    """Return how to download the model if `folder` does not exist and looks like a model's name on the Hugging Face
    hub. Otherwise return ""."""
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
        return ""
    return f"; nothing is downloaded here; a model of the hub: hf download {folder} --local-dir {folder.name}"
