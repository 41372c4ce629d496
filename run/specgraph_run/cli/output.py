"""A command's output: its JSON file, its text for people, and its exit after Ctrl-C.

A command checks the file before its work, and writes it before it shows figures: a broken terminal then loses nothing.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specgraph.errors import ConfigError, SpecgraphError
from specgraph_run.cli.interrupts import finished_first


def write_any_text() -> None:
    """Let standard output and error write a character that their encoding lacks, as its escape: `\\u2192`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if it is closed; or a caller's own stream
            stream.reconfigure(errors="backslashreplace")


def check_output(option: str, to: str | Path | None) -> None:
    """Raise ConfigError if a file can't be written: its name is empty or a folder's, its folder is missing, or there
    is no permission.

    Args:
        option: the option that names the file, for the message.
        to: the file; `-` (standard output) and None are always right.
    """
    if to is None or to == "-":
        return
    path = Path(to)
    if not str(to).strip() or path.is_dir():
        raise ConfigError(f"{option} '{to}': give the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {to}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {to}: no permission to write it")


def write_json(data: Any, to: str | None) -> None:
    """Write `data` as JSON to a file. `-` is standard output; None writes nothing.

    Raises:
        SpecgraphError: the file can't be written.
    """
    if to is None:
        return
    text = json.dumps(data, indent=2) + "\n"
    if to == "-":
        sys.stdout.write(text)
        return
    try:
        with finished_first():
            Path(to).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecgraphError(f"{to} can't be written: {error.strerror or error}") from None


def text_output(json_to: str | None) -> TextIO:
    """Return the stream for people: standard error if standard output takes the JSON."""
    return sys.stderr if json_to == "-" else sys.stdout


class TextConsole(Console):
    """A console that raises BrokenPipeError if its reader is gone. rich's own console ends the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def text_consoles(json_to: str | None, quiet: bool = False) -> tuple[Console, Console]:
    """Return the console for generated text and the console for notes about it.

    Both are the same console on a terminal, or if JSON takes standard output. Otherwise standard output gets the text
    alone, so that it can be piped, and notes go to standard error.
    """
    text = TextConsole(file=text_output(json_to), highlight=False, quiet=quiet)
    together = text.is_terminal or json_to == "-"
    return text, text if together else TextConsole(stderr=True, highlight=False, quiet=quiet)


def print_summary(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print rows of a name and its text as a table without a header."""
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a path is shown whole
    for name, text in rows:
        table.add_row(name, escape(text))
    console.print(table)


def exit_interrupted() -> NoReturn:
    """Exit with status 130 after a command that Ctrl-C interrupted has shown its figures."""
    print("specgraph: interrupted; these are the figures so far", file=sys.stderr)
    raise typer.Exit(130)
