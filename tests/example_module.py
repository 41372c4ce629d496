"""Loads a script of `examples/` as a module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"


@contextmanager
def example_module(path: str) -> Iterator[ModuleType]:
    """The script `path` below examples/; while it is used, `sys.modules` has it, where dataclasses look it up."""
    file = EXAMPLES / path
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
