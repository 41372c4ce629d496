"""docs/checkpoints.md names what the code reads and refuses."""

from pathlib import Path

import pytest

from specgraph.checkpoints.architectures import ARCHITECTURES
from specgraph.checkpoints.config_source import NEUTRAL
from specgraph.checkpoints.eagle3 import EAGLE_CONFIG
from specgraph.checkpoints.formats import LAYOUTS

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()


@pytest.mark.parametrize("name", [*ARCHITECTURES, *LAYOUTS, *NEUTRAL, *EAGLE_CONFIG])
def test_the_page_names(name):
    assert f"`{name}`" in PAGE
