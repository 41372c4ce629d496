"""Names and signatures of torch.musa, against a table made from torch_musa 2.7.1's sources.

Both sides are checked: the simulator presents exactly these, and the backend uses no others, in calls that fit them.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest

import torch_musa
from torch_musa.unmodelled import signature_of

ROOT = Path(__file__).resolve().parents[1]
TABLE = json.loads((ROOT / "api" / "torch_musa-2.7.1.json").read_text())
NAMES = TABLE["torch.musa"]
SOURCES = sorted((ROOT / "specgraph_musa").glob("*.py"))

BUILT_IN = {"__version__", "__init__", "__new__"}
MEMBERS_OF = {"raw": "MUSAGraph", "capturing": "graph", "now": "Stream", "properties": None, "side": "Stream"}
"""How this package names what it gets from torch.musa. `properties` are checked against `device_properties`."""


def plain(function) -> str:
    """The signature without annotations."""
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    return str(
        signature.replace(
            parameters=[p.replace(annotation=empty) for p in signature.parameters.values()],
            return_annotation=inspect.Signature.empty,
        )
    )


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_simulator_presents_it(name):
    entry, present = NAMES[name], getattr(torch_musa, name)
    if isinstance(entry, str):
        assert plain(present) == str(signature_of(entry))
        return
    for member, expected in entry.items():
        if expected == "property":
            assert hasattr(present, member), member
            continue
        found = inspect.getattr_static(present, member, None) or getattr(present, member)
        if isinstance(found, staticmethod | classmethod) or member not in vars(present):
            continue  # inherited from torch's own class, or without self: its name is there
        parameters = list(inspect.signature(found).parameters.values())[1:]
        got = inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters])
        assert str(got) == str(signature_of(expected)), member


def test_the_simulator_presents_nothing_else():
    public = {n for n in vars(torch_musa) if not n.startswith("_") and not inspect.ismodule(getattr(torch_musa, n))}
    assert public - set(NAMES) <= {"present"}


def musa_uses() -> list[tuple[Path, ast.Attribute, ast.Call | None]]:
    """Every `musa.name` and `self.musa.name` of the package, with the call it is part of."""
    found: list[tuple[Path, ast.Attribute, ast.Call | None]] = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_musa(node.value):
                found.append((path, node, calls.get(id(node))))
    return found


def _is_musa(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "musa") or (
        isinstance(node, ast.Attribute) and node.attr in ("musa", "_musa")
    )


def fits(call: ast.Call, signature: str) -> None:
    """Raises TypeError if the call's arguments don't fit."""
    positional = [None] * len(call.args)
    keywords = {k.arg: None for k in call.keywords if k.arg is not None}
    signature_of(signature).bind(*positional, **keywords)


def test_the_backend_uses_only_names_of_the_table():
    uses = musa_uses()
    assert len(uses) > 25
    for path, node, call in uses:
        assert node.attr in NAMES, f"{path.name}:{node.lineno} torch.musa.{node.attr}"
        entry = NAMES[node.attr]
        if call is not None:
            fits(call, entry if isinstance(entry, str) else entry.get("__init__", entry.get("__new__", "()")))


def test_graphs_are_passed_positionally():
    """The parameter is named musa_graph here and cuda_graph elsewhere."""
    calls = [call for _, node, call in musa_uses() if node.attr == "graph" and call is not None]
    assert calls
    assert all(call.args and not any(k.arg == "musa_graph" for k in call.keywords) for call in calls)


def test_members_of_graphs_streams_and_properties_are_in_the_table():
    seen = 0
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name | ast.Attribute):
                continue
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr.lstrip("_")
            if owner not in MEMBERS_OF:
                continue
            where = f"{path.name}:{node.lineno} {owner}.{node.attr}"
            if owner == "properties":
                assert node.attr in TABLE["device_properties"], where
            elif node.attr not in ("__enter__", "__exit__"):
                members = NAMES[MEMBERS_OF[owner]]
                assert node.attr in members, where
                if id(node) in calls:
                    fits(calls[id(node)], members[node.attr])
            seen += 1
    assert seen > 10


def test_the_binary_module_s_calls_are_in_the_table():
    tree = ast.parse((ROOT / "specgraph_musa" / "pools.py").read_text())
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("_musa_")}
    assert used == {"_musa_releasePool", "_musa_endAllocateCurrentStreamToPool"}
    assert used <= set(TABLE["torch_musa._MUSAC"])


def test_devices_are_told_apart_by_type_alone():
    """By `device.type`, as torch gives it; never by `is_cuda` or torch.cuda, which torchada fakes."""
    for path in SOURCES:
        attributes = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        assert not attributes & {"is_cuda", "cuda", "is_musa"}, path
