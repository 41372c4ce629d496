"""`specgraph platforms`: every installed backend, and whether it is available."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specgraph.errors import PlatformError
from specgraph_run.cli.options import JsonOption
from specgraph_run.cli.output import check_output, write_json
from specgraph_run.cli.waiting import announce

if TYPE_CHECKING:
    from specgraph.device import Discovered, Probe


def platforms(json: JsonOption = None) -> None:
    """Show every installed platform: available or why not, versions, capabilities, and which one is selected."""
    check_output("--json", json)
    announce("loading torch, then opening a device of each backend")
    from specgraph.device import discover, select_platform

    found = discover()
    rows = [_row(name, item) for name, item in found.items()]
    try:
        selected = select_platform(None, found, os.environ)
    except PlatformError as error:
        remark = f"none is selected: {error}"
    else:
        remark = f"selected: {selected.name}, because {selected.reason}"
        if selected.name not in found:
            remark += "; no platform of this name is installed"
        for row in rows:
            row["selected"] = selected.reason if row["name"] == selected.name else None
    write_json(rows, json)
    if json != "-":
        _show(rows, remark)


def _row(name: str, item: Discovered) -> dict[str, Any]:
    probe = item.probe()
    capabilities, reason = _capabilities(item, probe)
    return {
        "name": name,
        "distribution": item.distribution,
        "version": item.version,
        "available": probe.available and not reason,
        "reason": reason or probe.reason,
        "versions": dict(probe.versions),
        "capabilities": capabilities,
        "selected": None,
    }


def _capabilities(item: Discovered, probe: Probe) -> tuple[dict[str, Any], str]:
    """Return the capabilities of device 0, and the reason if it can't be opened ("" if it can)."""
    if item.backend is None or not probe.available:
        return {}, ""
    try:
        platform = item.backend.open(0)
    except Exception as error:
        return {}, f"opening it failed: {type(error).__name__}: {error}"
    try:
        supports = platform.capabilities.supports()
        return {key: {"level": value.level, "reason": value.reason} for key, value in supports.items()}, ""
    finally:
        platform.close()


def _show(rows: list[dict[str, Any]], remark: str) -> None:
    console = Console(highlight=False)
    for row in rows:
        state = "[green]available[/]" if row["available"] else "[yellow]not available[/]"
        state += f": {escape(row['reason'])}" if row["reason"] else ""
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        mark = "[bold green]*[/]" if row["selected"] else " "
        console.print(f"{mark} [bold]{row['name']}[/]  {row['distribution']} {row['version']}  {state}  {versions}")
        if row["capabilities"]:
            table = Table(show_header=False, box=None, padding=(0, 2))
            marks = {"yes": "[green]yes[/]", "no": "[red]no[/]", "quirk": "[yellow]quirk[/]"}
            for name, support in row["capabilities"].items():
                table.add_row("", name, marks[support["level"]], escape(support["reason"]))
            console.print(table)
    console.print(f"[bold green]*[/] {escape(remark)}; --platform NAME or SPECGRAPH_PLATFORM=NAME selects another one")
