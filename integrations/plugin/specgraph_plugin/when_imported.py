"""Calls a function when a module of a host engine is imported, without importing it earlier than the engine does."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, act: Callable[[Any], None]) -> None:
    """Call `act` with the module `name` once its code has run: now if it is imported already."""
    if (module := sys.modules.get(name)) is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _Once(name, act))


class _Once(MetaPathFinder):
    """Finds one module by the other finders, and lets `act` follow its code. It then leaves `sys.meta_path`."""

    def __init__(self, name: str, act: Callable[[Any], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._act(module)

            spec.loader.exec_module = exec_module
        return spec
