"""Ascend's own tests of NPU graphs, run through the unmodified torch_npu on the simulated runtime: a pytest plugin.

ASCENDSIM_BUILD is where the runtime was built. The plugin loads it before a test module imports torch_npu.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "backends/npu/simulator"))

import ascendsim
from peers.left_out import pytest_collection_modifyitems as pytest_collection_modifyitems

ascendsim.load(os.environ["ASCENDSIM_BUILD"], devices=2, hang_seconds=20, lenient="all")
