"""Settings for the tests of the core and of the integrations."""

from __future__ import annotations

import gc

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """Torch and transformers stay loaded: without this the collector goes through all of them again and again."""
    gc.collect()
    gc.freeze()
