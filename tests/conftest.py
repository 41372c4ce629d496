"""Settings for the whole suite."""

from __future__ import annotations

from hypothesis import settings

# No timed tests: the machine may be busy. Derandomised, so that a run that passes once passes always.
settings.register_profile("specgraph", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("specgraph")
