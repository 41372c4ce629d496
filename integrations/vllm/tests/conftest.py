"""The engine of the tests of the speculator."""

from __future__ import annotations

import pytest
import torch
from engine_rounds import Engine


@pytest.fixture
def engine(tmp_path, request) -> Engine:
    made = Engine(tmp_path, getattr(request, "param", "eagle3"), capture_sizes=[1, 3])
    with torch.inference_mode():  # as vLLM calls it
        made.start()
    return made
