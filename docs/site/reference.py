"""The reference pages of the site, made from the code: the public names, and the commands with their options."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

MODULES = ("attention", "checkpoints", "models", "engine", "parallel", "errors")
"""Modules of `specgraph` whose `__all__` is public, beside that of `specgraph` itself (docs/stability.md)."""

FIRST = ("Drafter", "DraftConfig", "ProposeBatch", "DraftTokens", "load_generator")
"""Names that a reader wants first."""


def api_page() -> str:
    """Return all public names for mkdocstrings: those at the top of `specgraph`, then those of its modules."""
    import specgraph

    top = specgraph.__all__
    lines = ["# Python", "", "`from specgraph import Drafter` for these names, which are all that an engine needs:", ""]
    lines += [f"::: specgraph.api.{name}\n" for name in sorted(top, key=lambda name: name not in FIRST)]
    for name in MODULES:
        module = import_module(f"specgraph.{name}")
        lines += [f"## specgraph.{name}", "", inspect.getdoc(module) or "", ""]
        lines += [f"::: {module.__name__}.{each}\n" for each in module.__all__ if each not in top]
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
