"""The ops whose lengths are host parameters, one row per op. To support another op, add a row.

A row says how the op is called in both passes: once in capture, inside its task group, and once per replay, inside a
task update, where everything but the lengths must be as captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specgraph.attention import HostLengths
from specgraph.errors import ConfigError
from specgraph.platforms import Support, yes
from specgraph_npu.probe import has_atb


def _query_ends(lengths: HostLengths) -> list[int]:
    return list(accumulate(lengths.query_lens))


def _seq_lens(lengths: HostLengths) -> list[int]:
    return list(lengths.seq_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOp:
    """One registered op that writes preallocated outputs and takes lengths from the host."""

    name: str
    op: str
    workspace_op: str
    """Takes the same arguments except outputs and workspace; returns enough memory for any lengths."""
    host: Mapping[str, Callable[[HostLengths], Any]]
    """Host parameters: each argument's name, and its value made from the lengths."""
    fixed: Mapping[str, Any]
    """Arguments that are the same in every call of this row."""
    scale: str
    heads: str = "num_heads"
    kv_heads: str = "num_key_value_heads"
    query: str = "query"
    key: str = "key"
    value: str = "value"
    tensors: tuple[str, ...] = ("block_table", "atten_mask")
    """Further tensor arguments that the caller gives."""
    namespace: str = "npu"
    """Where in torch.ops."""
    overload: str = "out"
    fused: bool = True
    """A fused-infer-attention op: [attention, log-sum-exp] as outputs, caches with all heads in one dimension."""
    available: Callable[[], Support] = yes

    @property
    def is_latent(self) -> bool:
        """Whether it is an MLA op: keys and values are one latent, rotated parts come separately."""
        return "query_rope" in self.tensors


_FIA = HostOp(
    name="fia",
    op="npu_fused_infer_attention_score",
    workspace_op="_npu_fused_infer_attention_score_get_max_workspace",
    host={"actual_seq_lengths": _query_ends, "actual_seq_lengths_kv": _seq_lens},
    fixed={"input_layout": "TND", "softmax_lse_flag": False},
    scale="scale",
)
_FIA2 = HostOp(
    name="fia-v2",
    op="npu_fused_infer_attention_score_v2",
    workspace_op="_npu_fused_infer_attention_score_v2_get_max_workspace",
    host={"actual_seq_qlen": _query_ends, "actual_seq_kvlen": _seq_lens},
    fixed={"input_layout": "TND", "return_softmax_lse": False},
    scale="softmax_scale",
    heads="num_query_heads",
    tensors=(*_FIA.tensors, "learnable_sink"),
)
_LATENT = (*_FIA.tensors, "query_rope", "key_rope")
_PAGED = HostOp(
    name="atb-paged",
    namespace="atb",
    op="_npu_paged_attention",
    overload="default",
    workspace_op="_npu_paged_attention_get_workspace",
    host={"context_lens": lambda lengths: torch.tensor(lengths.seq_lens, dtype=torch.int32)},
    fixed={},
    scale="scale_value",
    kv_heads="num_kv_heads",
    key="key_cache",
    value="value_cache",
    tensors=("block_table",),
    fused=False,
    available=has_atb,
)
_ROWS = (
    _FIA,
    replace(_FIA, name="fia-mla", tensors=_LATENT),
    _FIA2,
    replace(_FIA2, name="fia-v2-mla", tensors=_LATENT),
    _PAGED,
)
HOST_OPS: Mapping[str, HostOp] = {row.name: row for row in _ROWS}


@dataclass(frozen=True, slots=True)
class Call:
    """Everything but the lengths of one issue of a row: what capture and every later update have in common."""

    row: HostOp
    arguments: Mapping[str, Any]
    outputs: Sequence[Tensor]

    def workspace(self, lengths: HostLengths) -> Tensor:
        """Device memory that is enough for any lengths that fit the block table.

        Raises:
            RuntimeError: the op refuses the shapes, dtypes or lengths.
        """
        out = {} if self.row.fused else {"out": self.outputs[0]}
        return self._op(self.row.workspace_op, "default")(**self.arguments, **self.host_arguments(lengths), **out)

    def host_arguments(self, lengths: HostLengths) -> dict[str, Any]:
        """The host parameters of one issue, made from its lengths."""
        return {name: make(lengths) for name, make in self.row.host.items()}

    def issue(self, host_arguments: Mapping[str, Any], workspace: Tensor) -> None:
        """Issue the op on the current stream."""
        out = list(self.outputs) if self.row.fused else self.outputs[0]
        self._op(self.row.op, self.row.overload)(**self.arguments, **host_arguments, workspace=workspace, out=out)

    def weak(self, weak_reference: Callable[[Tensor], Tensor]) -> Call:
        """The same call without keeping its tensors alive."""
        arguments = {k: weak_reference(v) if isinstance(v, Tensor) else v for k, v in self.arguments.items()}
        return Call(self.row, arguments, [weak_reference(out) for out in self.outputs])

    def _op(self, name: str, overload: str) -> Any:
        return getattr(getattr(getattr(torch.ops, self.row.namespace), name), overload)


def make_call(
    row: HostOp, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *, num_heads: int, num_kv_heads: int,
    scale: float, tensors: Mapping[str, Tensor], options: Mapping[str, Any] | None = None,
) -> Call:  # fmt: skip
    """Put a row's arguments together.

    Args:
        query: [T, num_heads, head_dim]; `out`, [T, num_heads, value_dim], is written.
        key, value: caches in the op's form: [num_blocks, block_size, num_kv_heads * head_dim] for the fused rows.
        tensors: further tensors, of the names in `row.tensors`.
        options: further plain arguments, such as sparse_mode and block_size.

    Raises:
        ConfigError: a tensor that the row doesn't take.
    """
    if unknown := set(tensors) - set(row.tensors):
        raise ConfigError(f"host op '{row.name}' takes no {', '.join(sorted(unknown))}; it takes {row.tensors}")
    arguments: dict[str, Any] = {
        row.query: query, row.key: key, row.value: value, row.heads: num_heads, row.kv_heads: num_kv_heads,
        row.scale: scale, **row.fixed, **tensors, **(options or {}),
    }  # fmt: skip
    # the unused log-sum-exp is of shape [1], says op-plugin's document
    outputs = [out, torch.empty(1, dtype=torch.float32, device=query.device)] if row.fused else [out]
    return Call(row, arguments, outputs)
