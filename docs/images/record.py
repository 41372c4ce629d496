"""Write docs/images/generate.svg: what `specgraph generate` prints on a terminal, as it prints it.

    python docs/images/record.py

The command runs on a terminal of 100 columns; the escape sequences that it prints are turned into a picture.
"""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parent / "generate.svg"
COMMAND = ("generate", "--platform", "cpu", "--max-tokens", "60")
COLUMNS = 100
FONT = "font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace;"


def run(arguments: tuple[str, ...] = COMMAND) -> str:
    """Return what the command prints on a terminal, escape sequences included."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "COLORTERM": ""}
    command = [sys.executable, "-u", "-c", "from specgraph.cli import main; main()", *arguments]
    done = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=env)
    os.close(theirs)
    printed = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not part:
            break
        printed += part
    os.close(ours)
    if done.wait() != 0:
        raise SystemExit(f"specgraph {' '.join(arguments)} ended with status {done.returncode}")
    return printed.decode().replace("\r\n", "\n")


def picture(printed: str, title: str) -> str:
    """Return an SVG of a terminal; it loads no font from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(printed.rstrip("\n")))
    svg = console.export_svg(title=title, unique_id="specgraph")
    head, _, rest = svg.partition("@font-face")
    rest = rest[rest.rindex("@font-face") :].partition("}")[2] if "@font-face" in rest else rest.partition("}")[2]
    return (head + rest).replace("font-family: Fira Code, monospace;", FONT)


if __name__ == "__main__":
    shown = f"specgraph {' '.join(COMMAND)}"
    PICTURE.write_text(picture(run(), shown), encoding="utf-8")
    print(f"wrote {PICTURE}")
