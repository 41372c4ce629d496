"""All parts of this repository have one version number, and each part requires exactly that version of the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import specgraph_conformance
from specgraph_conformance.standard import SUITE_VERSION

import specgraph
from specgraph.device import PLATFORM_API

ROOT = Path(__file__).parents[1]
PARTS = [
    ".",
    "models",
    "run",
    "conformance",
    "backends/cuda",
    "backends/npu",
    "backends/musa",
    "backends/accelerator",
    "integrations/plugin",
    "integrations/transformers",
    "integrations/vllm",
    "integrations/vllm_ascend",
    "integrations/sglang",
    "drafters/smollm2",
]
VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)
REQUIRED = re.compile(r'"(specgraph-[a-z]+)([^"]*)"')


def test_every_part_is_listed() -> None:
    # No environment is walked through: another process may be installing it
    deep = ("pyproject.toml", "[!.]*/pyproject.toml", "[!.]*/[!.]*/pyproject.toml")
    found = {path.parent.relative_to(ROOT) for pattern in deep for path in ROOT.glob(pattern)}
    assert {Path(part) for part in PARTS} == {part for part in found if part.parts[:1] != ("build",)}


@pytest.mark.parametrize("part", PARTS)
def test_the_parts_have_one_version_and_pin_each_other(part: str) -> None:
    text = (ROOT / part / "pyproject.toml").read_text()
    assert VERSION.findall(text) == [specgraph.__version__]
    for name, required in REQUIRED.findall(text.partition("dependencies = [")[2].partition("]\n")[0]):
        assert required == f"=={specgraph.__version__}", f"{part} requires {name}{required}"


def test_the_modules_and_the_changelog_name_that_version() -> None:
    assert specgraph_conformance.__version__ == specgraph.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == specgraph.__version__


def test_the_page_about_what_is_stable_names_the_versions_of_the_interfaces() -> None:
    page = (ROOT / "docs/stability.md").read_text()
    assert re.findall(r"\(now ([\d.]+)\)", page) == [str(PLATFORM_API), SUITE_VERSION]
