"""The parts that `make` installs on a Python and a torch, and the torch that it asks for."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from fitting_parts import fitting, main, not_as_asked

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("*/*/pyproject.toml"))
CUDA = "specgraph-cuda is left out: it requires torch >=2.11, this is 2.7.1"
"""A line for a part that needs a newer torch."""


def asked(monkeypatch, capsys, *arguments, torch="2.13.0+cpu", python="3.12.1"):
    """Return the folders that are printed, and the lines about the others."""
    monkeypatch.setattr("fitting_parts.version", lambda name: torch)
    monkeypatch.setattr(sys, "argv", ["fitting_parts.py", "--python", python, *arguments])
    main()
    out, err = capsys.readouterr()
    return out.split(), err.splitlines()


def test_a_new_python_and_torch_have_all(monkeypatch, capsys):
    assert asked(monkeypatch, capsys, *FOLDERS) == (FOLDERS, [])


def test_the_oldest_torch_has_what_does_not_need_cuda(monkeypatch, capsys):
    found, said = asked(monkeypatch, capsys, *FOLDERS, torch="2.7.1")
    assert {*FOLDERS} - {*found} == {"backends/cuda"}
    assert said == [CUDA]


def test_the_oldest_python_has_what_does_not_need_transformers(monkeypatch, capsys):
    found, said = asked(monkeypatch, capsys, *FOLDERS, python="3.10.13")
    assert {*FOLDERS} - {*found} == {"integrations/transformers"}
    assert said == ["specgraph-transformers is left out: it requires Python >=3.11, this is 3.10.13"]


def test_the_wheels_of_what_fits(monkeypatch, capsys, tmp_path):
    for name in ("specgraph_cuda-0.1.0-py3-none-any.whl", "specgraph_transformers-0.1.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    folders = ("backends/cuda", "integrations/transformers")
    found, _ = asked(monkeypatch, capsys, "--wheels", str(tmp_path), *folders, torch="1.0", python="3.10.13")
    assert found == [str(tmp_path / "specgraph_cuda-0.1.0-py3-none-any.whl")]


def test_a_part_that_requires_one_that_is_left_out_is_left_out():
    projects = {
        "c": {"name": "c", "dependencies": ["b==1"]},
        "b": {"name": "b", "dependencies": ["a==1"]},
        "a": {"name": "a", "requires-python": ">=4"},
        "d": {"name": "d", "dependencies": ["numpy"]},
    }
    found, reasons = fitting(projects, "3.12.1", "2.13.0")
    assert (found, list(reasons)) == (["d"], ["a", "b", "c"])


def test_a_torch_that_was_not_asked_for_is_one_line(monkeypatch, capsys):
    with pytest.raises(SystemExit) as raised:
        asked(monkeypatch, capsys, "--torch", "torch==2.7.1", torch="2.14.1")
    assert str(raised.value).startswith("TORCH=torch==2.7.1 was asked for, and torch 2.14.1 is in ")
    for requirement in ("torch", "torch==2.13.0", "torch>=2.11", "./torch.whl", "torch @ https://example.org/a.whl"):
        assert not_as_asked(requirement, "2.13.0+cpu") is None


def test_no_install_behind_torch_may_bring_another():
    lines = re.findall(r"^.*\$\(call install,\$\(BIN\)/python,.*-e .*$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(lines) == 2
    assert all("$(HELD)" in line for line in lines)
