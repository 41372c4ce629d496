"""Registering the Triton ops as the implementations of the draft ops under a device's dispatch key."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from specgraph.kernels.attention_ops import AttentionOps
from specgraph.kernels.launch import LaunchOptions
from specgraph.kernels.linear_fp8_ops import Fp8LinearOps
from specgraph.kernels.next_step_ops import NextStepOps
from specgraph.kernels.row_ops import RowOps
from specgraph.kernels.sampling_parameters_ops import SamplingParameterOps
from specgraph.kernels.tree_ops import TreeOps
from specgraph.kernels.two_linears_ops import TwoLinearOps
from specgraph.kernels.verify_ops import VerifyOps
from specgraph.ops.experts import grouped_expert_mlp
from specgraph.ops.library import Around, implement, implement_all


class TritonOps(
    TwoLinearOps, NextStepOps, Fp8LinearOps, AttentionOps, RowOps, VerifyOps, TreeOps, SamplingParameterOps
):
    """One device's Triton ops. Every launch depends only on shapes, so equal shapes give equal bits."""

    __slots__ = ()


_registered: dict[str, TritonOps] = {}
"""The registered ops, by dispatch key."""


def register(dispatch_key: str, options: LaunchOptions | None = None, around: Around | None = None) -> TritonOps:
    """Make these the implementations of the draft ops under a torch dispatch key. The first registration stays."""
    if dispatch_key in _registered:
        return _registered[dispatch_key]
    ops = _registered[dispatch_key] = TritonOps(options or LaunchOptions())
    implement_all(ops, dispatch_key, around)
    implement("expert_mlp", dispatch_key, grouped_expert_mlp)  # torch's own ops
    return ops


def ops_of(dispatch_key: str) -> TritonOps | None:
    """Return the ops that were registered under a dispatch key; None if nothing was."""
    return _registered.get(dispatch_key)
