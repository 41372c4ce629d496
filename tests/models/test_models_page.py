"""docs/models.md is what the code says, and docs/checkpoints.md names what the code reads and refuses."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import write_models_page

from specgraph.checkpoints.architectures import ARCHITECTURES
from specgraph.checkpoints.config_source import NEUTRAL
from specgraph.checkpoints.eagle3 import EAGLE_CONFIG
from specgraph.checkpoints.formats import LAYOUTS


def test_the_page_is_current():
    assert write_models_page.PAGE.read_text() == write_models_page.page(), (
        "run python tests/models/write_models_page.py"
    )


def test_every_architecture_is_compared_with_transformers():
    compared = {write_models_page.MODEL_TYPES[a] for a, _ in write_models_page.test_target_parity.CASES.values()}
    assert compared == set(ARCHITECTURES)


@pytest.mark.parametrize("names", [ARCHITECTURES, LAYOUTS, NEUTRAL, EAGLE_CONFIG])
def test_the_page_of_checkpoints_names_all(names):
    text = write_models_page.PAGE.with_name("checkpoints.md").read_text()
    assert [name for name in names if f"`{name}`" not in text] == []
