"""vLLM's own tests of its speculators, with the plugin's class in front of vLLM's: a pytest plugin.

What the tests make are speculators before their start-up, of which none drafts through specgraph: what is seen is that
everything which reaches vLLM's own code through the plugin does there what vLLM expects.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from peers.left_out import pytest_collection_modifyitems as pytest_collection_modifyitems
from specgraph_plugin import ProposeCounts
from specgraph_plugin.vllm.config import Settings
from specgraph_vllm.speculator import Speculator

CLASSES = {
    "eagle": "EagleSpeculator",
    "mtp": "MTPSpeculator",
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
    "standalone_ar": "StandaloneARSpeculator",
    "target_dependent_ar": "TargetDependentARSpeculator",
}
"""The classes by module of vLLM 0.33's `spec_decode`."""


def with_the_plugin(stock: type) -> type:
    """Return the class that `adopt` gives an object of `stock`, for objects that tests make without a constructor."""
    made: Any = type(f"Specgraph{stock.__name__}", (Speculator, stock), {"draft_logits": None})
    made.start_specgraph(made, Settings(when_unsupported="vllm"), ())
    made.specgraph.counts = ProposeCounts(logging.getLogger(__name__), 0)
    return made


_PACKAGE = "vllm.v1.worker.gpu.spec_decode"
_MODULES: list[Any] = [importlib.import_module(f"{_PACKAGE}.{module}.speculator") for module in CLASSES]
for _of, _name in zip(_MODULES, CLASSES.values(), strict=True):  # imported first: some are others' bases
    setattr(_of, _name, with_the_plugin(getattr(_of, _name)))
