"""What `import specgraph` loads: nothing by itself, and torch, pluggy and the standard library for all public names."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import specgraph


def loaded(*statements: str) -> set[str]:
    """Distributions and modules, by their top-level name, that a fresh interpreter has after `statements`."""
    code = "; ".join((*statements, "import sys", "print(*{name.partition('.')[0] for name in sys.modules})"))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split()) - set(sys.stdlib_module_names)


def test_specgraph_alone_loads_nothing():
    assert loaded("import specgraph") - loaded("pass") == {"specgraph"}


def test_all_public_names_load_torch_and_pluggy_only():
    public = loaded("from specgraph import *", "load_generator, Drafter")
    assert public - loaded("import torch") == {"specgraph", "pluggy"}


@pytest.mark.parametrize("room", ["attention", "draft", "models"])
def test_a_room_can_be_imported_first(room):
    """Rooms import each other with `from specgraph import ops`, which must not load the whole API."""
    loaded(f"import specgraph.{room}")


def test_public_names():
    assert {"Drafter", "load_generator", "open_platform"} <= set(specgraph.__all__) <= set(dir(specgraph))
    page = (Path(__file__).parents[1] / "docs" / "stability.md").read_text().split("## Python")[1].split("- Before")[0]
    named = re.findall(r"`(specgraph[.\w]*)`", page)
    assert len(named) == 7
    for module in map(import_module, named):
        assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'specgraph' has no attribute 'no_such_name'"):
        specgraph.no_such_name  # noqa: B018
