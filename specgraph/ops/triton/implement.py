"""Registering the Triton ops as the implementations of the draft ops under a device's dispatch key."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specgraph.ops.experts import grouped_expert_mlp
from specgraph.ops.library import implement
from specgraph.ops.triton.attention_ops import AttentionOps
from specgraph.ops.triton.launch import LaunchOptions
from specgraph.ops.triton.linear_fp8_ops import Fp8LinearOps
from specgraph.ops.triton.next_step_ops import NextStepOps
from specgraph.ops.triton.past_rows_ops import PastRowOps
from specgraph.ops.triton.row_ops import RowOps
from specgraph.ops.triton.sampling_parameters_ops import SamplingParameterOps
from specgraph.ops.triton.tree_ops import TreeOps
from specgraph.ops.triton.two_linears_ops import TwoLinearOps
from specgraph.ops.triton.verify_ops import VerifyOps


@dataclass(frozen=True, slots=True)
class TritonOps(
    TwoLinearOps, NextStepOps, Fp8LinearOps, AttentionOps, RowOps, PastRowOps, VerifyOps, TreeOps, SamplingParameterOps
):
    """One device's Triton ops. Every launch depends only on shapes, so equal shapes give equal bits."""


_registered: dict[str, TritonOps] = {}
"""By dispatch key."""

_OPS = (
    "adjust_logits",
    "advance",
    "advance_tree",
    "begin_block",
    "begin_modules",
    "begin_propose",
    "begin_tree_verify",
    "begin_verify",
    "choose_nodes",
    "draft_block_greedy",
    "draft_block_gumbel",
    "draft_block_tree",
    "draft_greedy",
    "draft_gumbel",
    "greedy_block_head",
    "greedy_head",
    "greedy_next_step",
    "grow_tree",
    "gumbel_head",
    "keep_rows",
    "linear_norm_gate_up",
    "linear_norm_linear",
    "load_round",
    "move_kv",
    "next_verify",
    "norm_gate_up",
    "norm_linear",
    "paged_attention",
    "pair_linear",
    "publish_round",
    "rotate_and_store",
    "rotate_store_attend",
    "shift_token_ids",
    "stop_finished",
    "take_rows",
    "tree_attention",
    "verify_greedy",
    "verify_sampled",
    "verify_synthetic",
    "verify_tree",
    "verify_tree_synthetic",
)

_FP8_OPS = ("norm_gate_up_fp8", "norm_linear_fp8", "pair_linear_fp8")
"""Registered where `LaunchOptions.float8` says that the device converts e4m3."""


def register(
    dispatch_key: str,
    options: LaunchOptions | None = None,
    around: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None,
) -> TritonOps:
    """Make these the implementations of the draft ops under a torch dispatch key. The first registration stays.

    Args:
        around: what a device puts around each: (op name, implementation) -> implementation.
    """
    if dispatch_key in _registered:
        return _registered[dispatch_key]
    ops = _registered[dispatch_key] = TritonOps(options or LaunchOptions())
    for name in (*_OPS, *(_FP8_OPS if ops.options.float8 else ())):
        function: Callable[..., Any] = getattr(ops, name)
        implement(name, dispatch_key, function if around is None else around(name, function))
    implement("expert_mlp", dispatch_key, grouped_expert_mlp)  # torch's own ops
    return ops


def ops_of(dispatch_key: str) -> TritonOps | None:
    """What was registered under a dispatch key; None if nothing was."""
    return _registered.get(dispatch_key)
