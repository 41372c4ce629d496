"""A drafter's folder that fits every target of `tiny_targets`."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_checkpoints
from tiny_targets import VOCAB


@pytest.fixture(scope="session")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 head; with so small a vocabulary it is right now and then."""
    return tiny_checkpoints.write_eagle3(tmp_path_factory.mktemp("eagle3"), vocab=VOCAB, draft_vocab=VOCAB - 3)
