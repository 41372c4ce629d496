from __future__ import annotations

import sys
import textwrap
from importlib.metadata import distributions

import pytest


class Plugins:
    """Installs distributions with a backend plugin each into a folder, as pip would leave them."""

    def __init__(self, folder):
        self._folder = folder
        self._modules: list[str] = []

    def install(self, distribution: str, source: str, *, name: str = "fake", version: str = "1.0"):
        module = distribution.replace("-", "_")
        (self._folder / f"{module}.py").write_text(textwrap.dedent(source))
        info = self._folder / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[specgraph.backends]\n{name} = {module}\n")
        self._modules.append(module)

    def install_backend(self, distribution: str, *, name="fake", available=True, devices=2, accelerator=True, api=2):
        reason = "" if available else "no driver: install one"
        self.install(
            distribution,
            f"""
            from specgraph.device import Backend, Probe, hookimpl
            from specgraph.cpu import CpuPlatform

            class Opened(CpuPlatform):
                def __init__(self, index):
                    super().__init__()
                    self.opened = {name!r}, index

            @hookimpl
            def specgraph_backend():
                return Backend(
                    name={name!r}, accelerator={accelerator}, api={api}, open=Opened,
                    probe=lambda: Probe(available={available}, reason={reason!r}, device_count={devices}),
                )
            """,
            name=name,
        )

    def entries(self):
        return [e for d in distributions(path=[str(self._folder)]) for e in d.entry_points]

    def forget(self):
        for module in self._modules:
            sys.modules.pop(module, None)


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins = Plugins(tmp_path)
    yield plugins
    plugins.forget()
