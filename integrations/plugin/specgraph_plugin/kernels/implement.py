"""The implementation of the plugins' op on devices that Triton compiles for."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from specgraph.kernels.implement import Kernels
from specgraph_plugin.kernels import verified_rounds
from specgraph_plugin.kernels.verify_output import PluginOps

KERNELS = Kernels(PluginOps, verified_rounds)
