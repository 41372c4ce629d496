"""The commands' output on terminals of 80 and 140 columns, with colour, without it, or with no style at all."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from command import specgraph
from rich.console import Console
from specgraph_conformance.render import as_table, verdict
from specgraph_run.cli import app
from specgraph_run.cli.bench import _show as show_bench
from specgraph_run.cli.bench import _show_report as show_bench_report
from specgraph_run.cli.explain import _show as show_explained

from conformance.reports import complete_report

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
STYLE = re.compile(r"\x1b\[([\d;]*)m")
WIDTHS = (80, 140)
LOOKS = {
    "piped": {},
    "colour": {"FORCE_COLOR": "1", "TERM": "xterm-256color"},
    "no colour": {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm-256color"},
    "dumb": {"FORCE_COLOR": "1", "TERM": "dumb"},
}
QUICK = ("--decode", "eager", "--max-model-len", 128, "--prefill-sizes", 16, "--no-compare", "--max-tokens", 24)
OPTIONS = {"platforms": (), "generate": (*QUICK, "-k", 16)}
OUTPUTS = [("platforms", width, look) for width in WIDTHS for look in LOOKS]
OUTPUTS += [("generate", 80, "piped"), ("generate", 140, "colour"), ("generate", 80, "no colour")]
OUTPUTS += [("generate", 140, "dumb")]


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPECGRAPH_PLATFORM", "cpu")


def is_colour(code: str) -> bool:
    """Return whether a style is more than bold, dim, underlined or back to normal."""
    return any(int(number or 0) >= 30 for number in code.split(";"))


def check(text: str, width: int, look: str) -> str:
    """The text without its styles; nothing is wider than the terminal, cut, or coloured where that is not wanted."""
    codes = STYLE.findall(text)
    if look in ("piped", "dumb"):
        assert "\x1b" not in text
    assert any(map(is_colour, codes)) == (look == "colour")
    bare = STYLE.sub("", text)
    assert "\x1b" not in bare
    assert [line for line in bare.splitlines() if len(line.rstrip()) > width] == []
    assert "…" not in bare, "something is cut"
    return bare


@pytest.mark.parametrize(("command", "width", "look"), OUTPUTS)
def test_output_fits(command, width, look):
    run = specgraph(command, *OPTIONS[command], COLUMNS=str(width), **LOOKS[look])
    assert run.returncode == 0, run.stderr
    check(run.stdout, width, look)
    if command == "generate":
        marked = any("4" in code.split(";") for code in STYLE.findall(run.stdout))
        assert marked == (look in ("colour", "no colour")), "accepted text is underlined where there are styles"
        assert ("accepted draft tokens looks" in run.stdout) == marked


@pytest.mark.parametrize("width", WIDTHS)
def test_help_cuts_no_name(width):
    """In every look: help has no styles."""
    names = [command.callback.__name__.replace("_", "-") for command in app.registered_commands]
    text = specgraph("--help", COLUMNS=str(width)).stdout
    for command in app.registered_commands:
        assert " ".join(command.callback.__doc__.split("\n\n")[0].split()) in " ".join(text.split())
    for name in names:
        text = check(specgraph(name, "--help", COLUMNS=str(width), **LOOKS["colour"]).stdout, width, "piped")
    assert "--speculative-num-draft-tokens" in specgraph("generate", "--help", COLUMNS=str(width)).stdout
    assert "\nGenerator:\n" in specgraph("generate", "--help").stdout


def shown(call, width: int, look: str, *arguments) -> str:
    """Return what a function writes on a console."""
    console = Console(width=width, force_terminal=look != "piped", no_color=look == "no colour", _environ=LOOKS[look])
    with console.capture() as captured:
        call(console, *arguments)
    return STYLE.sub("", captured.get())


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_of_bench_cut_no_figure(width):
    """Rows as an H200 gave them, with all the columns that a GPU adds."""
    rows = json.loads((RESULTS / "h200-eagle3-llama3-8b.json").read_text())["rows"]
    columns = show_bench.__globals__["_TABLE"]
    text = shown(show_bench, width, "piped", "propose on a device", rows, columns)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    figures = {str(row[name]) for row in rows for name in ("device_us", "host_us", "ratio") if name in row}
    assert figures <= set(text.split())
    same = {name for name in ("requests", "k", "context") if len({row.get(name) for row in rows}) == 1}
    title = " ".join(text.partition("lowering")[0].split())
    assert all(f"{name} {rows[0][name]}" in title for name in same)


def test_why_a_lowering_was_refused_is_said_once():
    rows = [{"requests": 1, "lowering": "eager", "device_us": 5.0}]
    rows += [{"requests": 1, "lowering": "merged", "refused": "the platform [here] can't"}]
    text = shown(show_bench, 80, "piped", "propose", rows, ("requests", "lowering", "device_us", "host_us"))
    assert text.count("the platform [here] can't") == 1
    assert "merged, 1 requests: refused: the platform" in text


RATES = ("tokens_per_second", "tokens_per_second_least", "tokens_per_second_most")


def test_a_difference_within_the_spread_is_said():
    same = {"requests": 1, "k": 5, "context": 9, "host_us": 1.0}
    rows = [
        {**same, "lowering": lowering, "device_us": middle, "device_us_least": middle - 5, "device_us_most": middle + 9}
        for lowering, middle in (("eager", 300.0), ("step", 100.0), ("merged", 95.0))
    ]
    rounds = [
        {**same, "lowering": lowering, **dict(zip(RATES, rates, strict=True))}
        for lowering, rates in (("step", (50, 49, 51)), ("merged", (70, 66, 74)), ("eager", (73, 72, 75)))
    ]
    report = {"device": "one", "device_kind": "GPU", "rows": [*rows, {**rows[2], "requests": 2}], "rounds": rounds}
    lines = shown(show_bench_report, 80, "piped", report, "a shape", None).splitlines()
    assert "1 requests: step and merged are 5.0 us apart, less than the spread of either, 14.0" in lines
    assert "1 requests: merged and eager are 3.0 tokens/s apart, less than the spread of either, 8.0" in lines
    assert len([line for line in lines if "apart" in line]) == 2


@pytest.fixture(scope="module")
def explained():
    small = ("--max-num-requests", 2, "--max-model-len", 64, "--prefill-sizes", 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECGRAPH_PLATFORM", "cpu")
        return json.loads(specgraph("explain", *small, "--json", "-").stdout)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("width", WIDTHS)
def test_explain_fits(explained, width, look):
    text = shown(show_explained, width, look, explained)
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for row in explained["captured"]:
        assert re.search(rf"\b{row['model']}\W+{row['phase']}\W+{row['requests']}\b", text), row


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("absent", [("task_update", "float8"), ("order_detection",)], ids=["many", "few"])
def test_a_report_of_the_suite_fits(absent, width, look):
    report = complete_report(absent)
    text = shown(lambda console: console.print(as_table(report)), width, look)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    said = " ".join(text.split())
    assert verdict(report) in said
    reasons = Counter(result.reason for result in report.cases if result.outcome == "absent")
    assert reasons
    for reason, count in reasons.items():
        assert f"because {' '.join(reason.split())}" in said
        assert count == 1 or f"not run: {count} cases of " in said


def on_a_terminal(*arguments: str) -> str:
    """Run Python on a pseudo-terminal, with no variable that says how wide it is or what it can show."""
    ours, theirs = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen([sys.executable, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        parts: list[bytes] = []
        try:
            while part := os.read(ours, 4096):
                parts.append(part)
        except OSError:  # how Linux says that the other end is closed
            pass
        os.close(ours)
        assert process.wait() == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_a_terminal_of_the_system():
    text = check(on_a_terminal("-c", "from specgraph_run.cli import main; main()", "platforms"), 80, "colour")
    assert "* cpu" in text


UNTIL_TORCH = """
import os, sys

class Watched:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.write(2, b"<torch>")
            raise SystemExit

sys.meta_path.insert(0, Watched())
from specgraph_run.cli import main
for command in sys.argv[1:]:
    sys.argv = ["specgraph", *command.split()]
    os.write(2, f"<{command}>".encode())
    try:
        main()
    except SystemExit:
        pass
"""


def test_a_terminal_is_told_what_is_waited_for_before_torch_is_imported(tmp_path):
    """Each command's first output comes before its slow work. Commands that are not here import no torch."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    commands = ["generate", f"chat --target {tmp_path}", "platforms", "explain", "bench", "audit", "env"]
    commands += [f"draft-vocab {__file__}", "conformance cpu", "conformance vectors here"]
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", on_a_terminal("-c", UNTIL_TORCH, *commands))
    for command in commands:
        first, torch, _ = shown.partition(f"<{command}>")[2].partition("<torch>")
        assert torch, shown
        assert "loading" in first, command
        assert "<" not in first, command
