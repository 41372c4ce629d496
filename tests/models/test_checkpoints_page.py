"""docs/checkpoints.md names what the code reads and refuses."""

from pathlib import Path

import pytest
from specgraph_models.checkpoints.architectures import ARCHITECTURES
from specgraph_models.checkpoints.config_source import NEUTRAL
from specgraph_models.checkpoints.eagle3 import EAGLE_CONFIG
from specgraph_models.checkpoints.gguf_file import ARCHITECTURES as GGUF
from specgraph_models.checkpoints.readers import READERS
from specgraph_run.decoder.request import UNSUPPORTED

PAGE = Path(__file__).parents[2] / "docs/checkpoints.md"


@pytest.mark.parametrize("names", [ARCHITECTURES, READERS, NEUTRAL, EAGLE_CONFIG, GGUF, UNSUPPORTED])
def test_the_page_names_all(names):
    assert [name for name in names if f"`{name}`" not in PAGE.read_text()] == []


def test_the_page_says_why_a_parameter_is_refused():
    assert [name for name, why in UNSUPPORTED.items() if f"| `{name}` | {why} |\n" not in PAGE.read_text()] == []
