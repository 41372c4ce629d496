"""`import specgraph` loads nothing by itself, and torch, pluggy and the standard library for all public names."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from check_packages import typed_packages

import specgraph

PROBE = "import specgraph.device as devices; devices.discover()['cpu'].probe()"


FORKS = """
import json, os, sys
for number, statement in enumerate(sys.argv[1:]):
    if (fork := os.fork()) == 0:
        exec(statement)
        print(json.dumps([number, list(sys.modules)]), flush=True)
        os._exit(0)
    if os.waitpid(fork, 0)[1]:
        sys.exit(f"{statement} failed")
"""


def loaded(first: str, *statements: str) -> list[set[str]]:
    """The modules that a fresh interpreter has after `first` and, in a fork of it, each of the statements."""
    command = [sys.executable, "-c", first + FORKS, *statements]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return [set(names) for _, names in sorted(map(json.loads, run.stdout.splitlines()))]


def packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)


def test_the_core_and_the_command_alone_load_nothing():
    before, core, run = loaded("", "pass", "import specgraph", "import specgraph_run")
    assert packages(core - before) == {"specgraph"}
    assert packages(run - before) == {"specgraph_run"}


def test_options_and_the_interface_of_devices_load_no_torch():
    """Commands take options and names of devices from them before torch is there."""
    rooms = [f"import {room}" for room in ("specgraph.config", "specgraph.device", "specgraph_run.options")]
    rooms += ["import specgraph_run.cli"]
    assert [packages(after) & {"torch", "numpy"} for after in loaded("", *rooms)] == [set()] * len(rooms)


def test_public_names_load_torch_and_pluggy_only_and_any_room_can_be_first():
    """Rooms import each other with `from specgraph import ops`, which must not load the whole API."""
    rooms = [f"import specgraph.{room}" for room in ("attention", "draft", "ops")]
    names = "from specgraph import *; allocate_caches, Drafter"
    before, public, probed, *_ = loaded("import torch", "pass", names, PROBE, *rooms)
    assert packages(public) - packages(before) == {"specgraph", "pluggy"}
    assert not (probed - before) & {"torch._inductor", "triton"}, "the recorder's internals come with `open` only"


ONLY_TORCH_AND_PLUGGY = """
import re, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

allowed, new = set(), ["torch", "pluggy"]
while new:  # what they require, and what that requires
    name = re.match(r"[\\w.-]+", new.pop())[0].lower().replace("_", "-")
    if name not in allowed:
        allowed.add(name)
        try:
            new += [line for line in requires(name) or () if "extra ==" not in line]
        except PackageNotFoundError:  # of another system
            pass
places = packages_distributions()

class Refusing:
    def find_spec(self, name, path=None, target=None):
        owners = {each.lower().replace("_", "-") for each in places.get(name, ())}
        if name.startswith("specgraph_") or (owners and not owners & allowed and name != "specgraph"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Refusing())
"""


def test_the_core_drafts_with_torch_and_pluggy_alone():
    """The page's head, in an interpreter that finds nothing else than what torch itself requires."""
    page = (Path(__file__).parents[1] / "docs/writing-a-drafter.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    command = [sys.executable, "-W", "ignore", "-c", f"{ONLY_TORCH_AND_PLUGGY}{code}\nprint(dict(drafter.launches))"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert ast.literal_eval(run.stdout.splitlines()[-1]) == {"propose": 1}
    refused = subprocess.run(
        [sys.executable, "-c", ONLY_TORCH_AND_PLUGGY + "import specgraph_models"], capture_output=True, check=False
    )
    assert b"No module named 'specgraph_models'" in refused.stderr


FOREIGN = {"vllm", "sglang", "torch_npu", "torch_musa", "triton", "cuda", "transformers", "pytest"}
"""Packages that a module may need and an environment may lack."""
OTHER_PARTS = {f"specgraph_{name}" for name in ("cuda", "transformers", "vllm", "sglang")}
"""Parts that `make` leaves out where Python or torch is too old for them."""
EVERY_MODULE = """
import sys
from importlib import import_module
for name in sys.argv[1:]:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        print(name, (error.name or "").partition(".")[0])
"""


def test_every_module_of_every_part_imports():
    """On each Python that we name, as far as what a module needs is there."""
    names = []
    for mark in typed_packages(Path(__file__).parents[1]):
        files = sorted(mark.parent.rglob("*.py"))
        names += [".".join(file.relative_to(mark.parents[1]).with_suffix("").parts) for file in files]
    assert len(names) > 300
    names = [name.removesuffix(".__init__") for name in names]
    run = subprocess.run([sys.executable, "-c", EVERY_MODULE, *names], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    lacking = dict(line.split() for line in run.stdout.splitlines())
    may_lack = FOREIGN | OTHER_PARTS
    assert {name: lacks for name, lacks in lacking.items() if lacks not in may_lack} == {}


def test_public_names():
    assert {"Drafter", "allocate_caches", "open_platform"} <= set(specgraph.__all__) <= set(dir(specgraph))
    page = (Path(__file__).parents[1] / "docs" / "stability.md").read_text().split("## Python")[1].split("- Before")[0]
    named = re.findall(r"`(specgraph[.\w]*)`", page)
    assert len(named) == 10
    for module in map(import_module, named):
        assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'specgraph' has no attribute 'no_such_name'"):
        specgraph.no_such_name  # noqa: B018
