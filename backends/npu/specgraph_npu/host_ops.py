"""The ops whose lengths are host parameters, one row per op. To support another op, add a row.

A row says how the op is called in both passes: once in capture, inside its task group, and once per replay, inside a
task update, where everything but the lengths must be as captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specgraph.attention import HostLengths
from specgraph.errors import ConfigError
from specgraph.platforms import Support, yes
from specgraph_npu.probe import has_atb


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOp:
    """One registered op that writes preallocated outputs and takes lengths from the host."""

    name: str
    op: str
    workspace_op: str
    """Takes the same arguments except outputs and workspace; returns enough memory for any lengths."""
    host: Mapping[str, Callable[[HostLengths], Any]]
    """Host parameters: each argument's name, and its value made from the lengths."""
    arguments: tuple[str, ...]
    """The other arguments, by the names that all rows share."""
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the op calls an argument whose name is another one than the shared one."""
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments that are the same in every call of this row, by the op's own names."""
    namespace: str = "npu"
    """Where in torch.ops."""
    overload: str = "out"
    fused: bool = True
    """A fused-infer-attention op: [attention, log-sum-exp] as outputs, caches with all heads in one dimension."""
    available: Callable[[], Support] = yes

    @property
    def is_latent(self) -> bool:
        """Whether it is an MLA op: keys and values are one latent, rotated parts come separately."""
        return "query_rope" in self.arguments

    @property
    def keywords(self) -> set[str]:
        """All names that the op is called with, except outputs and workspace."""
        return {self.renamed.get(name, name) for name in self.arguments} | {*self.host, *self.fixed}

    def host_of(self, lengths: HostLengths) -> dict[str, Any]:
        """The host parameters of one issue."""
        return {name: make(lengths) for name, make in self.host.items()}

    def function(self, name: str, overload: str) -> Any:
        """An op of this row's namespace."""
        return getattr(getattr(getattr(torch.ops, self.namespace), name), overload)


_HostValue = Callable[[HostLengths], Any]
_query_ends: _HostValue = lambda lengths: list(accumulate(lengths.query_lens))  # noqa: E731
_seq_lens: _HostValue = lambda lengths: list(lengths.seq_lens)  # noqa: E731
_SHARED = ("query", "key", "value", "num_heads", "num_key_value_heads", "scale", "block_table")
_FIA = HostOp(
    name="fia",
    op="npu_fused_infer_attention_score",
    workspace_op="_npu_fused_infer_attention_score_get_max_workspace",
    host={"actual_seq_lengths": _query_ends, "actual_seq_lengths_kv": _seq_lens},
    arguments=(*_SHARED, "atten_mask", "sparse_mode", "block_size", "pre_tokens", "next_tokens"),
    fixed={"input_layout": "TND", "softmax_lse_flag": False},
)
_FIA2 = HostOp(
    name="fia-v2",
    op="npu_fused_infer_attention_score_v2",
    workspace_op="_npu_fused_infer_attention_score_v2_get_max_workspace",
    host={"actual_seq_qlen": _query_ends, "actual_seq_kvlen": _seq_lens},
    arguments=(*_FIA.arguments, "learnable_sink"),
    renamed={"num_heads": "num_query_heads", "scale": "softmax_scale"},
    fixed={"input_layout": "TND", "return_softmax_lse": False},
)
_LATENT = (*_FIA.arguments, "query_rope", "key_rope")
_PAGED = HostOp(
    name="atb-paged",
    namespace="atb",
    op="_npu_paged_attention",
    overload="default",
    workspace_op="_npu_paged_attention_get_workspace",
    host={"context_lens": lambda lengths: torch.tensor(lengths.seq_lens, dtype=torch.int32)},
    arguments=_SHARED,
    renamed={"key": "key_cache", "value": "value_cache", "scale": "scale_value", "num_key_value_heads": "num_kv_heads"},
    fused=False,
    available=has_atb,
)
_MLA = (replace(row, name=f"{row.name}-mla", arguments=_LATENT) for row in (_FIA, _FIA2))
HOST_OPS: Mapping[str, HostOp] = {row.name: row for row in (_FIA, _FIA2, *_MLA, _PAGED)}


@dataclass(frozen=True, slots=True)
class Call:
    """Everything but the lengths of one issue of a row: what capture and every later update have in common."""

    row: HostOp
    arguments: Mapping[str, Any]
    """By the op's own names, with `out` and `workspace`."""

    def issue(self, lengths: HostLengths) -> Callable[[], None]:
        """Make the host arguments; returns the function that issues the op with them on the current stream."""
        return partial(self.row.function(self.row.op, self.row.overload), **self.arguments, **self.row.host_of(lengths))

    def weak(self, weak_reference: Callable[[Tensor], Tensor]) -> Call:
        """The same call without keeping its tensors alive."""
        return Call(self.row, tree_map_only(Tensor, weak_reference, dict(self.arguments)))


def make_call(row: HostOp, out: Tensor, lengths: HostLengths, **arguments: Any) -> Call:
    """Put a row's arguments together, with a workspace that is enough for any lengths that fit the block table.

    Args:
        out: [T, num_heads, value_dim], written.
        lengths: any that the op takes. RuntimeError: the op refuses them, or the shapes or dtypes.
        arguments: of the names in `row.arguments`. query is [T, num_heads, head_dim]; key and value are caches,
            [num_blocks, block_size, num_kv_heads * head_dim] for the fused rows. Those left out have the op's defaults.
    """
    if unknown := set(arguments) - set(row.arguments):
        raise ConfigError(f"host op '{row.name}' takes no {', '.join(sorted(unknown))}; it takes {row.arguments}")
    named = {**{row.renamed.get(name, name): value for name, value in arguments.items()}, **row.fixed}
    # the unused log-sum-exp is of shape [1], says op-plugin's document
    written = [out, torch.empty(1, dtype=torch.float32, device=out.device)] if row.fused else out
    asked = named if row.fused else {**named, "out": out}
    workspace = row.function(row.workspace_op, "default")(**asked, **row.host_of(lengths))
    return Call(row, {**named, "workspace": workspace, "out": written})
