"""Processes that are forked from one in which torch, the suite and the tasks of ranks are loaded, and nothing has run.

A process of its own costs a test what it does in it, not the seconds of imports.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pkgutil import iter_modules

import pytest
from _pytest.config import default_plugins
from specgraph_conformance import cases

CASES = [f"{cases.__name__}.{module.name}" for module in iter_modules(cases.__path__)]
PRELOAD = [
    "mutants.run",
    "mutants.all",
    "parallel.processes",
    "specgraph_conformance.run",
    "rich.console",
    "specgraph.cpu.platform",
    "torch.fx.experimental.symbolic_shapes",  # meta kernels import it
    "torch.testing",
    *CASES,
    *(f"_pytest.{name}" for name in default_plugins),
]


def forks() -> ForkServerContext:
    """Return the context that starts them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        forkserver.ensure_running()
    return context
