"""Every registered draft op is called by a case of group `kernels`."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from specgraph_conformance import cases

from specgraph import ops

FILES = sorted(Path(cases.__path__[0]).glob("test_kernels*.py"))


def ops_called(source: str) -> set[str]:
    """Names of `kernels.NAME(...)` and `partial(kernels.NAME, ...)` calls."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    partials = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "partial" and call.args]
    called = [*(call.func for call in calls), *(call.args[0] for call in partials)]
    return {
        op.attr
        for op in called
        if isinstance(op, ast.Attribute) and isinstance(op.value, ast.Name) and op.value.id == "kernels"
    }


def registered_ops() -> set[str]:
    """Names in torch's registry, of the namespace of the core."""
    assert ops.advance  # registers them all
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("specgraph::").partition(".")[0] for name in names if name.startswith("specgraph::")}


def test_every_registered_op_has_a_case() -> None:
    called = set().union(*(ops_called(path.read_text()) for path in FILES))
    registered = registered_ops()
    assert len(registered) >= 20
    assert registered - called == set(), "no case of group kernels calls these ops"
