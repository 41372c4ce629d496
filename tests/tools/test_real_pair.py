"""examples/real_pair.py types commands that exist, and its table shows failures beside figures."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from specgraph_run import shipped_pair
from specgraph_run.cli import app
from typer.main import get_command

SCRIPT = Path(__file__).parents[2] / "examples/real_pair.py"
TEXT = {
    "acceptance_per_position": [0.5, 0.25], "tokens_per_second_without_drafting": 10.0, "tokens_per_second": 15.0,
    "platform": "cpu", "device": "x86_64", "lowering": "merged", "graph_launches_per_propose": 1.0,
    "mean_acceptance_length": 1.75,
}  # fmt: skip


def test_the_script_reports_every_command(tmp_path, monkeypatch, capsys):
    typed = []

    def run(command, **_):
        name, *options = command[3:]
        typed.append(name)
        if options:
            get_command(app).commands[name].make_context(name, [*options])  # refuses an option that it lacks
        if name == "audit":
            return subprocess.CompletedProcess(command, 1, "", "loading\nspecgraph: the tensor step.positions differs")
        if "--json" in options:
            Path(options[options.index("--json") + 1]).write_text(json.dumps(TEXT))
        return subprocess.CompletedProcess(command, 0, "specgraph 0.1.0", "")

    monkeypatch.setattr(subprocess, "run", run)
    written = tmp_path / "real-pair.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, shipped_pair()), "--chat", "--out", str(written)])
    with pytest.raises(SystemExit, match="True"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert typed == ["env", "explain", "audit", "generate"]
    shown = capsys.readouterr().out
    for line in ("failed: specgraph: the tensor step.positions differs", "1.75", "15, without drafts 10", "50%  25%"):
        assert line in shown
    assert set(json.loads(written.read_text())) == set(typed)
