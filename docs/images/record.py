"""Write docs/images/chat.svg: a conversation with SmolLM2 in `specgraph chat`, as a terminal shows it.

    python docs/images/record.py

The command runs on a terminal of 100 columns, on which the messages are typed; the escape sequences that it prints are
turned into a picture.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parent / "chat.svg"
COMMAND = ("chat", "--model", "smollm2", "--platform", "cpu", "--max-tokens", "100")
MESSAGES = ("Why is the sky blue?", "Write a Python function that returns the vowels of a string.")
PROMPT = b"> "
COLUMNS = 100
FONT = "font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace;"


def run(arguments: tuple[str, ...] = COMMAND, messages: tuple[str, ...] = MESSAGES) -> str:
    """Return what the command prints on a terminal, escape sequences included; each prompt gets the next message."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "COLORTERM": ""}
    command = [sys.executable, "-u", "-c", "from specgraph.cli import main; main()", *arguments]
    done = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=env)
    os.close(theirs)
    printed, told, left = b"", 0, [*messages, ""]
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not part:
            break
        printed += part
        line = re.sub(rb"\x1b\[[\d;?]*[a-zA-Z]", b"", printed[told:]).rpartition(b"\n")[2]
        if left and line == PROMPT:
            told = len(printed)
            os.write(ours, f"{left.pop(0)}\n".encode())
    os.close(ours)
    if done.wait() != 0:
        raise SystemExit(f"specgraph {' '.join(arguments)} ended with status {done.returncode}")
    return printed.decode().replace("\r\n", "\n").rstrip("\n").rpartition("\n")[0]  # without the last prompt


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
