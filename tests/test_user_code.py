"""Whose line an error names: the user's, never one of our own packages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from specgraph.errors import CaptureError
from specgraph.user_code import raising_line, users_code, variable_name

OURS = ("specgraph", "specgraph_models.layers", "specgraph_plugin.prompts", "specgraph_run.decoder.verify")
THEIRS = ("specgraph_vendor.platform", "specgraphs", "my_head", "__main__")


def in_module(name: str, source: str) -> Callable[..., Any]:
    """Return the function `f` of a module of that name, whose file is in no folder of ours."""
    module: dict[str, Any] = {"__name__": name}
    exec(compile(source, f"/elsewhere/{name}.py", "exec"), module)
    return module["f"]


FAILS = "def f():\n    raise OSError('no such weight')"
CAPTURES = """
def f(users_code, error, body):
    with users_code("capture failed", error, theirs_alone=True):
        body()
"""


def capture(body: Callable[[], None]) -> None:
    in_module("specgraph.capture", CAPTURES)(users_code, CaptureError, body)


@pytest.mark.parametrize("name", OURS)
def test_a_fault_of_ours_passes_through(name: str):
    with pytest.raises(OSError, match="no such weight"):
        capture(in_module(name, FAILS))


@pytest.mark.parametrize("name", THEIRS)
def test_a_fault_of_the_users_names_its_line(name: str):
    fault = rf"^capture failed \(at /elsewhere/{name}.py:2\): OSError: no such weight$"
    with pytest.raises(CaptureError, match=fault):
        capture(in_module(name, FAILS))


def test_the_line_is_the_users_where_it_calls_ours():
    calls = in_module("my_head", "def f(inner):\n    inner()")
    with pytest.raises(OSError, match="no such weight") as raised:
        calls(in_module("specgraph_models.layers", FAILS))
    assert raising_line(raised.value) == "/elsewhere/my_head.py:2"


@pytest.mark.parametrize(("name", "found"), [("specgraph_models.layers", "scale"), ("my_head", "")])
def test_the_name_of_a_tensor_is_looked_for_up_to_the_users_own_line(name: str, found: str):
    scale = torch.ones(2)
    asks = in_module(name, "def f(ask):\n    return ask()")
    calls = in_module("their_program", "def f(asks, ask, scale):\n    return asks(ask)")
    assert calls(asks, partial(variable_name, scale), scale) == found
