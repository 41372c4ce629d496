"""Every registered draft op is called by a case of group `kernels`."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from specgraph_conformance import cases, op_rows

from specgraph.ops.library import declared

FILES = [*Path(cases.__path__[0]).glob("test_kernels*.py"), *Path(op_rows.__path__[0]).glob("*.py")]


def ops_named(source: str) -> set[str]:
    """The attributes of `ops`, `model_ops` and `decoder_ops` that a module reads."""
    attributes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id.endswith("ops")}


def registered_ops() -> set[str]:
    """Names in torch's registry, of our namespace: those of all packages that the op table imports. tests/plugin checks
    the plugin room's, which another test of this process may have registered."""
    assert op_rows.ROWS
    names = torch._C._dispatch_get_all_op_names()
    found = {name.removeprefix("specgraph::").partition(".")[0] for name in names if name.startswith("specgraph::")}
    return found - {name for name, op in declared().items() if op.reference.__module__.startswith("specgraph_plugin.")}


def test_every_registered_op_has_a_case() -> None:
    named = set().union(*(ops_named(path.read_text()) for path in FILES))
    registered = registered_ops()
    assert len(registered) >= 20
    assert registered - named == set(), "no case of group kernels calls these ops"
