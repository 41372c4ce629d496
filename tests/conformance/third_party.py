"""Backends that know nothing of this repository: distributions on a path of their own, with or without faults."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from textwrap import dedent

import command
import pytest
from command import Done

GOOD = """
    from specgraph.device import PLATFORM_API, Backend, PlatformInfo, Probe, hookimpl
    from specgraph.device.cpu import CpuGraph, CpuPlatform

    class Platform(CpuPlatform):
        def __init__(self):
            super().__init__()
            i = self.info
            self.info = PlatformInfo("acme", i.device, "a device", i.versions, "a stand-in")

    def _open(index):
        return Platform()

    @hookimpl
    def specgraph_backend():
        probe = lambda: Probe(True, "", 1, {"driver": "7"})
        return Backend(name="acme", probe=probe, open=_open, api=PLATFORM_API, accelerator=False)
"""


def install(folder: Path, code: str = GOOD, extra: str = "", xfails: str | None = None) -> Path:
    """Put a distribution `acme-backend` 1.2 with the module `acme_backend.plugin` under `folder`; returns `folder`."""
    package, info = folder / "acme_backend", folder / "acme_backend-1.2.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(dedent(code) + dedent(extra))
    if xfails is not None:
        (package / "xfails.toml").write_text(dedent(xfails))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-backend\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[specgraph.backends]\nacme = acme_backend.plugin\n")
    return folder


def specgraph(folder: Path, *args: str) -> Done:
    """Run the command with the distribution under `folder` installed; the suite itself runs in a process of its own."""
    path = os.pathsep.join([str(folder), *(p for p in [os.environ.get("PYTHONPATH")] if p)])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr("xdist.workermanage._sys_path", [*sys.path])  # a copy of when this process began
        try:
            return command.specgraph(*args, cwd=folder, PYTHONPATH=path, OMP_NUM_THREADS="1")
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "acme_backend"]:
                del sys.modules[name]
