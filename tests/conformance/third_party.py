"""Backends that know nothing of this repository: distributions on a path of their own, with or without faults."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import command
import pytest
from command import Done

GOOD = """
    from specgraph.device import PLATFORM_API, Backend, PlatformInfo, Probe, hookimpl
    from specgraph.cpu import CpuGraph, CpuPlatform

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


def specgraph(folder: Path, *args: str, jobs: int = 0, path: Sequence[Path] = ()) -> Done:
    """Run the suite in `folder`, with the distribution that is there installed.

    Args:
        jobs: processes that run cases; with 0 they run in this one, which has torch and the suite loaded.
        path: what is importable besides the folder.
    """
    added = [str(each) for each in (folder, *path)]
    with pytest.MonkeyPatch.context() as patch:
        for each in added:
            patch.syspath_prepend(each)
        patch.setattr("xdist.workermanage._sys_path", [*sys.path])  # a copy of when this process began
        try:
            environ = {
                "PYTHONPATH": os.pathsep.join([*added, os.environ.get("PYTHONPATH", "")]),
                "OMP_NUM_THREADS": "1",
            }
            return command.specgraph("conformance", *args, "--jobs", jobs, cwd=folder, **environ)
        finally:
            for name in [name for name in sys.modules if "acme" in name.partition(".")[0]]:
                del sys.modules[name]
