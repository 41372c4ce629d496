"""`specgraph env`: the versions, machine and backends that a bug report needs."""

from __future__ import annotations

import os
import platform as machine
import shlex
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specgraph_run.cli.options import JsonOption
from specgraph_run.cli.output import check_output, write_json
from specgraph_run.cli.waiting import announce

if TYPE_CHECKING:
    from specgraph.device import Platform

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "pluggy", "typer", "rich")
_VARIABLES = ("SPECGRAPH_", "OMP_", "MKL_", "TORCH_", "PYTORCH_", "TRITON_")
_DEVICES = "_VISIBLE_DEVICES"


def env(json: JsonOption = None) -> None:
    """Show versions, the machine, the environment variables that matter, and every backend, for a bug report."""
    check_output("--json", json)
    announce("loading torch, then asking each backend")
    import torch

    from specgraph.device import discover

    backends = discover()
    prefixes = (*_VARIABLES, *(f"{name.upper()}_" for name in backends))
    packages = {each.name.lower().replace("_", "-"): each.version for each in distributions() if each.name}
    report: dict[str, Any] = {
        "specgraph": {name: version for name, version in sorted(packages.items()) if name.startswith("specgraph")},
        "python": machine.python_version(),
        "system": machine.platform(),
        "cpu": {"name": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "packages": {
            **{name: version for name, version in sorted(packages.items()) if name.startswith(_PACKAGES)},
            "torch": torch.__version__,  # with its build, such as +cpu: the package's metadata may lack it
        },
        "backends": {
            name: "available" if (probe := item.probe()).available else f"not available: {probe.reason}"
            for name, item in backends.items()
        },
        "caches": caches(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(prefixes) or name.endswith(_DEVICES)
        },
    }
    write_json(report, json)
    if json != "-":
        for name, value in report.items():
            if not isinstance(value, dict):
                typer.echo(f"{name}: {value}")
                continue
            typer.echo(f"{name}:")
            for key, each in value.items():
                typer.echo(f"  {key}: {each}")


def caches() -> dict[str, str]:
    """Return the folders that keep compiled kernels, and results of trials on this machine, between processes."""
    variables, home = os.environ, str(Path.home())
    ours = variables.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    triton = variables.get("TRITON_CACHE_DIR") or os.path.join(variables.get("TRITON_HOME") or home, ".triton", "cache")
    return {"compiled kernels": triton, "trials": os.path.join(ours, "specgraph")}


def environment(platform: Platform) -> dict[str, Any]:
    """Return the entries of a result file about the machine and the command that measured it."""
    import torch

    info = platform.info
    return {
        "platform": info.name,
        "device": info.device_name,
        "device_kind": info.device_kind,
        "versions": {**info.versions, "threads": str(torch.get_num_threads())},
        "command": shlex.join(["specgraph", *sys.argv[1:]]),
    }


def cpu_name() -> str:
    """Return the processor's name from /proc/cpuinfo, or Python's name for it if there is none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        lines = []
    return lines[0] if lines else machine.processor() or sys.platform
