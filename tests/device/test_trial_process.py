"""The file that keeps the findings of trials, which ran in a process of their own."""

from __future__ import annotations

import pytest

from specgraph.device import open_platform, trial, trial_process


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', '{"x": {"graphs": 3}}'])
def test_a_broken_file_is_no_file(tmp_path, content):
    file = tmp_path / "specgraph/trials.json"
    file.parent.mkdir()
    file.write_text(content)
    assert trial_process.read(file) == {}
    trial_process.keep(file, "key", {"graphs": ""})
    assert trial_process.read(file) == {"key": {"graphs": ""}}


def test_another_user_s_file_is_not_read(tmp_path, monkeypatch):
    file = tmp_path / "specgraph/trials.json"
    trial_process.keep(file, "key", {"graphs": ""})
    monkeypatch.setattr(trial_process.os, "getuid", lambda: -1)
    assert trial_process.read(file) == {}


def test_a_folder_that_can_t_be_written_costs_the_memory_only(tmp_path, caplog):
    file = tmp_path / "specgraph/trials.json"
    file.parent.write_text("a file where the folder should be")
    trial_process.keep(file, "key", {"graphs": ""})
    assert "is not kept" in caplog.text
    assert trial_process.read(file) == {}


def test_a_trial_that_raises_is_a_trial_that_failed():
    def broken(platform) -> None:
        raise RuntimeError("device lost\nlong story")

    assert trial.outcome(open_platform("cpu"), broken) == "RuntimeError: device lost"
