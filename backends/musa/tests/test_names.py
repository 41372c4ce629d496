"""Names and signatures of torch.musa, against tables made from the sources of torch_musa 2.7.1 and 2.11.0.post2.

Every side is checked: what the simulator presents is as in 2.7.1; the package's own table of calls fits both releases;
and the package's code calls nothing that its table lacks.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from specgraph.device.installed import missing_names

import torch_musa
from specgraph_musa.graph import END_RECORDING
from specgraph_musa.probe import CALLS

ROOT = Path(__file__).resolve().parents[1]
TABLES = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "api").glob("*.json"))}
TABLE = TABLES["torch_musa-2.7.1"]
NAMES = TABLE["torch.musa"]
SOURCES = sorted((ROOT / "specgraph_musa").glob("*.py"))

MEMBERS_OF = {"raw": "MUSAGraph", "_raw": "MUSAGraph", "now": "Stream", "properties": None}
"""The class behind each name that the package's code gives to objects of torch.musa. `properties` are checked against
`device_properties`."""


def signature_of(text: str) -> inspect.Signature:
    """The signature of a table's entry such as "(device=None)"."""
    scope = {}
    exec(f"def f{text}: ...", scope)
    return inspect.signature(scope["f"])


PUBLIC = sorted(n for n, x in vars(torch_musa).items() if n[0] != "_" and not inspect.ismodule(x))


@pytest.mark.parametrize("name", PUBLIC)
def test_what_the_simulator_presents_is_as_in_2_7_1(name):
    entry, present = NAMES[name], getattr(torch_musa, name)
    if isinstance(entry, str):
        assert str(inspect.signature(present)) == str(signature_of(entry))
        return
    for member, expected in entry.items():
        found = vars(present).get(member)
        if found is not None and not isinstance(found, staticmethod | classmethod | property):  # those have no self
            parameters = list(inspect.signature(found).parameters.values())[1:]
            assert str(inspect.Signature(parameters)) == str(signature_of(expected)), member


def musa_uses() -> list[tuple[Path, ast.Attribute, ast.Call | None]]:
    """Every `musa.name` and `self.musa.name` of the package, with the call it is part of."""
    found: list[tuple[Path, ast.Attribute, ast.Call | None]] = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] == "musa":
                found.append((path, node, calls.get(id(node))))
    return found


@pytest.mark.parametrize("release", sorted(TABLES))
@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_package_s_calls_fit_each_release(release, name):
    entry, arguments = TABLES[release]["torch.musa"], CALLS[name]
    for part in name.split("."):
        entry = entry[part]
    if arguments is None:
        assert entry == "property"
        return
    if isinstance(entry, dict):
        entry = entry.get("__init__") or entry["__new__"]
    positional = [None for a in arguments if not a.endswith("=") and a != "self"]
    signature_of(entry).bind(*positional, **{a.rstrip("="): None for a in arguments if a.endswith("=")})


def test_the_package_uses_only_names_of_its_table():
    uses = musa_uses()
    assert len(uses) > 20
    for path, node, call in uses:
        assert node.attr in CALLS or node.attr in ("__version__", "musa"), f"{path.name}:{node.lineno} {node.attr}"
        if call is not None and (arguments := CALLS[node.attr]) is not None:
            keywords = [f"{k.arg}=" for k in call.keywords if k.arg in ("enable_timing", "capture_error_mode")]
            assert len(call.args) + len(keywords) == len(arguments), f"{path.name}:{node.lineno} {node.attr}"


def test_members_of_graphs_streams_and_properties_are_in_the_table():
    seen = 0
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name | ast.Attribute):
                continue
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if owner not in MEMBERS_OF:
                continue
            where = f"{path.name}:{node.lineno} {owner}.{node.attr}"
            if owner == "properties":
                assert node.attr in TABLE["device_properties"], where
            else:
                assert f"{MEMBERS_OF[owner]}.{node.attr}" in CALLS, where
            seen += 1
    assert seen > 8


def test_what_is_missing_is_named_all_of_it():
    assert missing_names(torch_musa, CALLS) == []

    class Graph:
        def capture_begin(self, pool):
            pass

        capture_end = pool = replay = reset = lambda self: None

    names = {name: each for name, each in vars(torch_musa).items() if name != "empty_cache"}
    found = SimpleNamespace(**names | {"MUSAGraph": Graph, "synchronize": lambda: None})
    assert missing_names(found, CALLS) == [
        "MUSAGraph.capture_begin(pool, capture_error_mode=), which is (self, pool) here",
        "MUSAGraph.get_latest_instance",
        "empty_cache",
        "synchronize(device), which is () here",
    ]


def test_the_binary_module_s_calls_are_in_the_tables():
    source = (ROOT / "specgraph_musa" / "graph.py").read_text()
    used = set(re.findall(r"_musa_\w+", source)) - {"_musa_releasePool"}
    assert used == set(END_RECORDING)
    for table in TABLES.values():
        calls = table["torch_musa._MUSAC"]
        assert "_musa_releasePool" in calls
        assert any(name in calls for name in END_RECORDING)


def test_devices_are_told_apart_by_type_alone():
    """The code asks for `device.type`; never for `is_cuda` or torch.cuda, which torchada replaces."""
    for path in SOURCES:
        attributes = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        assert not attributes & {"is_cuda", "cuda", "is_musa"}, path
