"""Settings for the whole suite."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

# No timed tests: the machine may be busy. Derandomised, so that a run that passes once passes always.
settings.register_profile("specgraph", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("specgraph")


def pytest_collection_finish(session: pytest.Session) -> None:
    """torch and transformers stay loaded: without this the collector goes through all of them again and again."""
    gc.collect()
    gc.freeze()
