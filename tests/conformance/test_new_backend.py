"""A backend from empty to green: the skeleton, installed into a fresh venv, and the guide applied to it."""

from __future__ import annotations

import json
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
import specgraph_conformance
import specgraph_models
import specgraph_run
from command import Done
from conformance.guide import blocks, follow
from specgraph_conformance.standard import SUITE_VERSION
from specgraph_run.cli import app
from specgraph_run.cli.new_backend import write_backend
from typer.testing import CliRunner

import specgraph
from conformance import third_party
from specgraph.errors import ConfigError

GUIDE = Path(__file__).parents[2] / "docs" / "writing-a-backend.md"


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the skeleton `acme` and a fresh venv that has torch, specgraph, the suite, and acme from pip."""
    folder = tmp_path_factory.mktemp("author")
    write_backend("acme", folder / "specgraph-acme")
    venv.create(folder / "venv", symlinks=True)
    # torch and the packages under test come from this environment's folders; only acme is installed.
    shared = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    shared += [
        str(Path(module.__file__ or "").parents[1])
        for module in (specgraph, specgraph_models, specgraph_run, specgraph_conformance)
    ]
    (site(folder) / "shared.pth").write_text("\n".join(dict.fromkeys(shared)) + "\n")
    pip = [folder / "venv/bin/python", "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, folder / "specgraph-acme"], check=True, cwd=folder)
    return folder


def site(folder: Path) -> Path:
    """The packages of the fresh venv."""
    return next((folder / "venv").rglob("site-packages"))


def conformance(folder: Path, *args: str) -> Done:
    """Run the suite here on what is installed in the fresh venv, with the skeleton's files as they are by now."""
    return third_party.specgraph(folder, "acme", *args, path=[site(folder), folder / "specgraph-acme"])


@pytest.mark.slow
def test_the_skeleton_is_found_and_its_failures_lead_in_order(author: Path) -> None:
    command = [author / "venv/bin/python", "-m", "specgraph_run", "platforms", "--json", "-"]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=author, check=True)
    (found,) = [entry for entry in json.loads(listed.stdout) if entry["name"] == "acme"]
    assert found["distribution"] == "specgraph-acme"
    assert found["available"]
    done = conformance(author, "--quick", "--json", "first.json")
    assert done.returncode == 1
    assert "begin with discovery.handles-have-torchs-verbs" in done.stdout
    report = json.loads((author / "first.json").read_text())
    failed = [case for case in report["cases"] if case["outcome"] == "failed"]
    assert all("NotImplementedError" in case["reason"] or "[]" in case["reason"] for case in failed)


GROUPS = ("discovery", "device", "streams", "capture", "replay")


@pytest.mark.slow
def test_the_guide_leads_to_green(author: Path) -> None:
    """Runs after the test above, on the same skeleton."""
    assert len(blocks(GUIDE.read_text())) == 5
    follow(GUIDE.read_text(), author / "specgraph-acme")
    groups = [word for group in GROUPS for word in ("--group", group)]
    done = conformance(author, *groups, "--profile", "graphs", "--json", "last.json")
    assert done.returncode == 0, done.stdout
    assert f"graphs {SUITE_VERSION}: conforms" in done.stdout
    counts = json.loads((author / "last.json").read_text())["counts"]
    assert counts["passed"] >= 90
    assert counts["failed"] == 0


@pytest.mark.slow
def test_the_guides_backend_drafts(author: Path) -> None:
    """Runs after the tests above: quick cases of the groups that draft, through the guide's graphs."""
    groups = [word for group in ("drafting", "decoding") for word in ("--group", group)]
    done = conformance(author, "--quick", *groups)
    assert done.returncode == 0, done.stdout
    # Both compute indices out of buffers that the capture writes.
    indexed = "drafting.trees-equal-eager[eagle-auto]", "drafting.k-follows-the-batch[paged-mtp-modules]"
    done = conformance(author, *(word for case in indexed for word in ("--case", case)))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["Acme", "a-b", "1a", "", "cpu"])
def test_a_bad_name_is_refused(name: str, tmp_path: Path) -> None:
    from specgraph_run.cli.new_backend import new_backend

    with pytest.raises(ConfigError):
        new_backend(name, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    from specgraph_run.cli.new_backend import new_backend

    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError):
        new_backend("acme", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_skeleton_asks_no_index_for_our_names(tmp_path: Path) -> None:
    """specgraph-core and specgraph-conformance are on no package index: a stranger could take those names there."""
    shown = CliRunner().invoke(app, ["new-backend", "acme", "--folder", str(tmp_path / "new")]).output
    texts = [shown, *(path.read_text() for path in (tmp_path / "new").rglob("*") if path.is_file())]
    installs = [line for text in texts for line in text.splitlines() if "pip install" in line and "specgraph" in line]
    installs += [line for text in texts for line in text.splitlines() if "pip install" in line and " -e ." in line]
    assert len(installs) >= 3
    for line in installs:
        assert "--no-deps" in line or "/specgraph/conformance" in line, line
