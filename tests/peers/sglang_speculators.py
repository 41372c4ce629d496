"""SGLang's own tests of its speculators, with the plugin's classes in front of SGLang's: a pytest plugin.

The plugin's algorithms are in SGLang's registry, and its hooks are in place. What the tests make are workers before
their start-up, of which none drafts through specgraph: what is seen is that everything which reaches SGLang's own code
through the plugin does there what SGLang expects.
"""

from __future__ import annotations

import importlib
from typing import Any

from peers.left_out import pytest_collection_modifyitems as pytest_collection_modifyitems
from specgraph_sglang.names import SIZING_MODULE, WORKER_MODULE, differences
from specgraph_sglang.plugin import register
from specgraph_sglang.worker import draft_worker_class, worker_class

_worker: Any = importlib.import_module(WORKER_MODULE)
if _found := differences(_worker, importlib.import_module(SIZING_MODULE)):
    raise SystemExit(f"names of this SGLang differ: {'; '.join(_found)}")
register()
_hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
_hooks.HookRegistry.apply_hooks()

_draft_worker: Any = draft_worker_class(_worker.EagleDraftWorker, None)
_worker.EAGLEWorkerV2 = worker_class(_worker.EAGLEWorkerV2, _draft_worker)
_worker.EagleDraftWorker = _draft_worker
