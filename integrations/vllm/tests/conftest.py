"""The engine of the tests of the speculator."""

from __future__ import annotations

import pytest
import torch
from engine_rounds import Engine
from plugin.kernel_forms import recorded


@pytest.fixture
def engine(tmp_path, request, monkeypatch) -> Engine:
    forms = recorded(monkeypatch)
    made = Engine(tmp_path, getattr(request, "param", "eagle3"), capture_sizes=[1, 3])
    with torch.inference_mode():  # as vLLM calls it
        made.start()
    made.forms, made.forms_at_start = forms, [*forms]
    return made
