"""The ops whose lengths are host parameters, one row per op. To support another op, add a row.

A row says how the op is called in both passes: once in capture, inside its task group, and once per replay, inside a
task update, where everything but the lengths must be as captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from specgraph.attention import HostLengths
from specgraph.errors import ConfigError
from specgraph.platforms import Support, yes
from specgraph_npu.probe import has_atb

LengthForm = Literal["cumulative_query_lens", "seq_lens", "seq_lens_tensor"]

_FORMS: Mapping[LengthForm, Callable[[HostLengths], Any]] = {
    "cumulative_query_lens": lambda lengths: list(accumulate(lengths.query_lens)),
    "seq_lens": lambda lengths: list(lengths.seq_lens),
    "seq_lens_tensor": lambda lengths: torch.tensor(lengths.seq_lens, dtype=torch.int32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOp:
    """One registered op that writes preallocated outputs and takes lengths from the host."""

    name: str
    op: str
    overload: str
    workspace_op: str
    """Takes the same arguments except outputs and workspace; returns enough memory for any lengths."""
    host: Mapping[str, LengthForm]
    """Which arguments are host parameters, and in which form they take the lengths."""
    fixed: Mapping[str, Any]
    """Arguments that are the same in every call of this row."""
    heads: str
    kv_heads: str
    scale: str
    query: str = "query"
    key: str = "key"
    value: str = "value"
    tensors: tuple[str, ...] = ()
    """Further tensor arguments that the caller gives."""
    namespace: str = "npu"
    """Where in torch.ops."""
    fused: bool = True
    """A fused-infer-attention op: [attention, log-sum-exp] as outputs, caches with all heads in one dimension."""
    available: Callable[[], Support] = yes

    @property
    def is_latent(self) -> bool:
        """Whether it is an MLA op: keys and values are one latent, rotated parts come separately."""
        return "query_rope" in self.tensors


def _fia(name: str, *tensors: str) -> HostOp:
    """A row of npu_fused_infer_attention_score."""
    return HostOp(
        name=name,
        op="npu_fused_infer_attention_score",
        overload="out",
        workspace_op="_npu_fused_infer_attention_score_get_max_workspace",
        host={"actual_seq_lengths": "cumulative_query_lens", "actual_seq_lengths_kv": "seq_lens"},
        fixed={"input_layout": "TND", "softmax_lse_flag": False},
        heads="num_heads",
        kv_heads="num_key_value_heads",
        scale="scale",
        tensors=("block_table", "atten_mask", *tensors),
    )


def _fia2(name: str, *tensors: str) -> HostOp:
    """A row of npu_fused_infer_attention_score_v2."""
    return HostOp(
        name=name,
        op="npu_fused_infer_attention_score_v2",
        overload="out",
        workspace_op="_npu_fused_infer_attention_score_v2_get_max_workspace",
        host={"actual_seq_qlen": "cumulative_query_lens", "actual_seq_kvlen": "seq_lens"},
        fixed={"input_layout": "TND", "return_softmax_lse": False},
        heads="num_query_heads",
        kv_heads="num_key_value_heads",
        scale="softmax_scale",
        tensors=("block_table", "atten_mask", *tensors),
    )


_PAGED = HostOp(
    name="atb-paged",
    namespace="atb",
    op="_npu_paged_attention",
    overload="default",
    workspace_op="_npu_paged_attention_get_workspace",
    host={"context_lens": "seq_lens_tensor"},
    fixed={},
    heads="num_heads",
    kv_heads="num_kv_heads",
    scale="scale_value",
    key="key_cache",
    value="value_cache",
    tensors=("block_table",),
    fused=False,
    available=has_atb,
)
_ROWS = (
    _fia("fia"),
    _fia("fia-mla", "query_rope", "key_rope"),
    _fia2("fia-v2", "learnable_sink"),
    _fia2("fia-v2-mla", "query_rope", "key_rope"),
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
        given = {**self.arguments, **self.host_arguments(lengths)}
        if not self.row.fused:
            given["out"] = self.outputs[0]
        return self._op(self.row.workspace_op, "default")(**given)

    def host_arguments(self, lengths: HostLengths) -> dict[str, Any]:
        """The host parameters of one issue, made from its lengths."""
        return {name: _FORMS[form](lengths) for name, form in self.row.host.items()}

    def issue(self, host_arguments: Mapping[str, Any], workspace: Tensor) -> None:
        """Issue the op on the current stream."""
        out = list(self.outputs) if self.row.fused else self.outputs[0]
        given = {**self.arguments, **host_arguments, "workspace": workspace, "out": out}
        self._op(self.row.op, self.row.overload)(**given)

    def weak(self, weak_reference: Callable[[Tensor], Tensor]) -> Call:
        """The same call without keeping its tensors alive."""
        arguments = {k: weak_reference(v) if isinstance(v, Tensor) else v for k, v in self.arguments.items()}
        return Call(self.row, arguments, [weak_reference(out) for out in self.outputs])

    def _op(self, name: str, overload: str) -> Any:
        return getattr(getattr(getattr(torch.ops, self.row.namespace), name), overload)


def make_call(
    row: HostOp,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    tensors: Mapping[str, Tensor],
    options: Mapping[str, Any] | None = None,
) -> Call:
    """Put a row's arguments together.

    Args:
        query: [T, num_heads, head_dim].
        key, value: caches in the op's form: [num_blocks, block_size, num_kv_heads * head_dim] for the fused rows.
        out: [T, num_heads, value_dim], written.
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
    if not row.fused:
        return Call(row, arguments, [out])
    no_log_sum_exp = torch.empty(1, dtype=torch.float32, device=query.device)  # op-plugin's document: of shape [1]
    return Call(row, arguments, [out, no_log_sum_exp])
