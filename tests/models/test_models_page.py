"""docs/models.md is what the code says."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import write_models_page


def test_the_page_is_current():
    assert write_models_page.PAGE.read_text() == write_models_page.page(), (
        "run python tests/models/write_models_page.py"
    )


def test_every_architecture_is_compared_with_transformers():
    compared = {write_models_page.MODEL_TYPES[a] for a, _ in write_models_page.test_target_parity.CASES.values()}
    assert compared == set(write_models_page.ARCHITECTURES)
