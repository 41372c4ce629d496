"""Ctrl-C: real signals to a command, and while a file is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from specgraph_run.cli.interrupts import finished_first
from specgraph_run.cli.output import write_json

from specgraph.errors import ConfigError

STARTS = {
    "while the commands are loaded": "sys.meta_path.insert(0, Send('specgraph_run.cli.generate'))",
    "while torch is loaded": "sys.meta_path.insert(0, Send('torch'))",
    "before a command is chosen": "import typer.main as m; m.get_command = send",
    "in its options": "import typer.core as c; c.TyperGroup.make_context = send",
}
SEND = """
import os, signal, sys

def send(*arguments, **options):
    os.kill(os.getpid(), signal.SIGINT)

class Send:
    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path, target=None):
        if name == self.name:
            send()
"""


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_a_command_that_is_interrupted_says_so_in_one_line(start):
    code = f"{SEND}{start}\nfrom specgraph_run.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "platforms"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "specgraph: interrupted\n")


def send():
    os.kill(os.getpid(), signal.SIGINT)


def test_a_file_is_finished_first(tmp_path, monkeypatch):
    write = Path.write_text

    def in_two_parts(path, text, **encoding):
        write(path, text[:3], **encoding)
        send()
        write(path, text, **encoding)

    monkeypatch.setattr(Path, "write_text", in_two_parts)
    with pytest.raises(KeyboardInterrupt):
        write_json({"rounds": 3}, str(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text()) == {"rounds": 3}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_takes_effect_at_once():
    reached = []

    def work():
        with finished_first():
            for time in (1, 2):
                send()
                reached.append(time)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == [1]


def test_an_error_is_not_lost():
    def work(*calls):
        with finished_first():
            for call in calls:
                call()
            raise ConfigError("full")

    with pytest.raises(KeyboardInterrupt) as raised:
        work(send)
    assert isinstance(raised.value.__context__, ConfigError)
    with pytest.raises(ConfigError):
        work()


def test_nothing_is_changed_where_nothing_would_interrupt():
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with finished_first():
            send()
    finally:
        signal.signal(signal.SIGINT, former)
    seen = []

    def work():
        with finished_first():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [former]
