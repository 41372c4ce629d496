"""Makes the reference pages of the site from the code: the public names, and the commands with their options."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from specgraph_run.options import metadata_of

MODULES = (
    "specgraph.device", "specgraph.attention", "specgraph.draft", "specgraph.parallel", "specgraph.errors",
    "specgraph_models", "specgraph_models.errors", "specgraph_models.parallel", "specgraph_run",
    "specgraph_run.decoder", "specgraph_plugin",
)  # fmt: skip
"""Modules with a public `__all__`, besides `specgraph` itself (docs/stability.md)."""

FIRST = ("Drafter", "DraftConfig", "ProposeBatch", "DraftTokens")
"""Names that the page lists first."""


def api_page() -> str:
    """Return the page of all public names, for mkdocstrings: first the names of `specgraph`, then of each module."""
    import specgraph

    top, shown = specgraph.__all__, set(specgraph.__all__)
    lines = ["# Python", "", "`from specgraph import Drafter` for these names, which are all that an engine needs:", ""]
    for name in sorted(top, key=lambda name: name not in FIRST):
        lines += _documented(f"specgraph.api.{name}", getattr(specgraph, name))
    for name in MODULES:
        module = import_module(name)
        lines += [f"## {name}", "", inspect.getdoc(module) or "", ""]
        for each in module.__all__:
            if each not in shown:
                shown.add(each)
                lines += _documented(f"{name}.{each}", getattr(module, each))
    return "\n".join(lines)


def commands_page() -> str:
    """Return the page of all commands, with the arguments and options of their `--help`."""
    from specgraph_run.cli import PARTS, app, load_part

    lines = ["# Commands", "", "`specgraph --install-completion` completes commands and options in your shell.", ""]
    for command in app.registered_commands:
        function: Any = command.callback
        if (name := function.__name__.replace("_", "-")) in PARTS:
            function, _ = load_part(name)
        lines += [f"## specgraph {function.__name__.replace('_', '-')}", "", inspect.getdoc(function) or "", ""]
        panels: dict[str, list[str]] = {}
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            kind, info = get_args(parameter.annotation)
            if info.hidden:
                continue
            panel = "Arguments" if "Argument" in type(info).__name__ else info.rich_help_panel or "Options"
            panels.setdefault(panel, []).append(_row(parameter, kind, info))
        for panel, rows in panels.items():
            lines += [f"| {panel.lower()} | type | | default |", "|---|---|---|---|", *rows, ""]
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
    return f"| {', '.join(f'`{name}`' for name in flags)} | {_type(kind)} | {text} | {shown} |"


def _type(kind: Any) -> str:
    """Return an option's type in one word, or its choices."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(kind))
    if get_origin(kind) is list:
        return f"{_type(get_args(kind)[0])}, repeatable"
    named = {bool: "flag", int: "integer", float: "number", str: "text", Path: "path"}
    return named[kind] if kind in named else _type(next(each for each in get_args(kind) if each is not type(None)))


def _documented(name: str, value: Any) -> list[str]:
    """Return the lines of a name's entry. Fields that are also options of commands become a table."""
    options = [each for each in (fields(value) if is_dataclass(value) else ()) if metadata_of(each)]
    if not options:
        return [f"::: {name}", ""]
    kinds = get_type_hints(value)
    rows = [
        f"| `{each.name}` | {_type(kinds[each.name]) if get_origin(kinds[each.name]) is Literal else f'`{each.type}`'} "
        f"| {metadata_of(each)['help']} | `{each.default}` |"
        for each in options
    ]
    return [
        f"::: {name}", "    options: {show_signature: false}", "",
        "| field | type | | default |", "|---|---|---|---|", *rows, "",
    ]  # fmt: skip
