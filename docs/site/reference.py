"""The reference pages of the site, made from the code: the public names, and the commands with their options."""

from __future__ import annotations

import ast
import inspect
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).parents[2]

TITLES = {
    "engine": "Text and requests",
    "draft": "Drafting",
    "attention": "Attention",
    "checkpoints": "Checkpoints",
    "models": "What a model must offer",
    "options": "Options of an engine",
    "device": "Platforms",
    "errors": "Errors",
}
"""Rooms of specgraph/ with public names, in the order of the page; others follow under their own name."""

FIRST = (".load_generator", ".TextGenerator", ".Drafter", ".ProposeBatch", ".DraftTokens", ".AttentionBackend")
"""Names that a reader wants first in their room."""


def api_page() -> str:
    """Return all names of specgraph/api.py, by room, for mkdocstrings."""
    tree = ast.parse((ROOT / "specgraph" / "api.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    names = [
        (str(node.module).split(".")[1], f"{node.module}.{alias.name}") for node in imports for alias in node.names
    ]
    titles = TITLES | {room: room.capitalize() for room, _ in names if room not in TITLES}
    names.sort(key=lambda each: (list(titles).index(each[0]), not each[1].endswith(FIRST)))
    lines = [
        "# Python",
        "",
        "Every name here is imported from `specgraph`: `from specgraph import load_generator`.",
        "",
    ]
    for room, group in groupby(names, key=lambda each: each[0]):
        lines += [f"## {titles[room]}", ""]
        for _, name in group:
            lines += [f"::: {name}", ""]
    return "\n".join(lines)


def commands_page() -> str:
    """Return every command with its arguments and options, as `--help` has them."""
    from specgraph.cli import app

    lines = ["# Commands", "", "`specgraph --install-completion` completes commands and options in your shell.", ""]
    for command in app.registered_commands:
        function: Any = command.callback
        lines += [f"## specgraph {function.__name__.replace('_', '-')}", "", inspect.getdoc(function) or "", ""]
        panels: dict[str, list[str]] = {}
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            kind, info = get_args(parameter.annotation)
            if info.hidden:
                continue
            panel = "Arguments" if "Argument" in type(info).__name__ else info.rich_help_panel or "Options"
            panels.setdefault(panel, []).append(_row(parameter, kind, info))
        for panel, rows in panels.items():
            lines += [f"| {panel.lower()} | | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(parameter: inspect.Parameter, kind: Any, info: Any) -> str:
    flag = f"--{parameter.name.replace('_', '-')}"
    flags = [flag, f"--no-{flag[2:]}"] if kind is bool else [flag]
    if "Argument" in type(info).__name__:
        flags = [parameter.name.upper()]
    declared = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
    flags = [each for each in declared if each.startswith("-")] or flags
    shown = "" if parameter.default in (None, "", ()) else f"`{parameter.default}`"
    text = (info.help or "").replace("|", "\\|")
    if get_origin(kind) is Literal:
        text += f" One of {', '.join(f'`{each}`' for each in get_args(kind))}."
    return f"| {', '.join(f'`{name}`' for name in flags)} | {text} | {shown} |"
