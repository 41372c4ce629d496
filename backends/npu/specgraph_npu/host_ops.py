"""The attention ops that take lengths from the host, one row per op. To support another op, add a row.

A row describes the op's call. It is issued once in the capture, inside its task group. Then it is issued once per
replay, inside a task update, with the same arguments except the lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from specgraph.attention import HostLengths
from specgraph.device import Support, no, yes
from specgraph.errors import ConfigError
from specgraph_npu.probe import library


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOp:
    """One registered op that writes preallocated outputs and takes lengths from the host."""

    name: str
    op: str
    workspace_op: str
    """The op that returns the workspace. It takes the same arguments except outputs and workspace, and its memory is
    enough for any lengths."""
    host: Mapping[str, Callable[[HostLengths], Any]]
    """The host parameters: the op's name of the argument, and the function that makes its value from the lengths."""
    arguments: tuple[str, ...]
    """The other arguments that the op takes, by the names that all rows share."""
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Shared name -> the op's own name, for arguments with another name."""
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments with the same value in every call of this row, by the op's own names."""
    lse_flag: str = ""
    """The argument that turns on the log-sum-exp of each row and head. Empty if the op has no such output."""
    namespace: str = "npu"
    """The namespace in torch.ops."""
    overload: str = "out"
    fused: bool = True
    """True for a fused-infer-attention op: its outputs are [attention, log-sum-exp], and its caches have all heads in
    one dimension."""
    available: Callable[[], Support] = yes

    @property
    def is_latent(self) -> bool:
        """True for an MLA op: key and value are the same latent, and the rotated parts are separate arguments."""
        return "query_rope" in self.arguments

    def with_lengths(self, call: partial[Any], lengths: HostLengths) -> partial[Any]:
        """Return `call` with the host parameters made from `lengths`. It issues the op on the current stream."""
        return partial(call, **{name: make(lengths) for name, make in self.host.items()})


def _query_ends(lengths: HostLengths) -> list[int]:
    return list(accumulate(lengths.query_lens))


def _on_host(lengths: HostLengths) -> Tensor:
    """Return the keys per request, int32, in newly allocated host memory: torch_npu's queue reads it later."""
    made = torch.empty(len(lengths.seq_lens), dtype=torch.int32)  # `torch.tensor` would be an input of the capture
    made.numpy()[:] = lengths.seq_lens
    return made


_SHARED = ("query", "key", "value", "num_heads", "num_key_value_heads", "scale", "block_table")
_FIA = HostOp(
    name="fia",
    op="npu_fused_infer_attention_score",
    workspace_op="_npu_fused_infer_attention_score_get_max_workspace",
    host={"actual_seq_lengths": _query_ends, "actual_seq_lengths_kv": attrgetter("seq_lens")},
    arguments=(*_SHARED, "atten_mask", "sparse_mode", "block_size", "pre_tokens", "next_tokens"),
    fixed={"input_layout": "TND"},
    lse_flag="softmax_lse_flag",
)
_FIA2 = HostOp(
    name="fia-v2",
    op="npu_fused_infer_attention_score_v2",
    workspace_op="_npu_fused_infer_attention_score_v2_get_max_workspace",
    host={"actual_seq_qlen": _query_ends, "actual_seq_kvlen": attrgetter("seq_lens")},
    arguments=(*_FIA.arguments, "learnable_sink"),
    renamed={"num_heads": "num_query_heads", "scale": "softmax_scale"},
    fixed={"input_layout": "TND"},
    lse_flag="return_softmax_lse",
)
_LATENT = (*_FIA.arguments, "query_rope", "key_rope")
_NO_ATB = "libatb.so is missing: install the CANN NNAL package and source its set_env.sh"
_PAGED = HostOp(
    name="atb-paged",
    namespace="atb",
    op="_npu_paged_attention",
    overload="default",
    workspace_op="_npu_paged_attention_get_workspace",
    host={"context_lens": _on_host},
    arguments=_SHARED,
    renamed={"key": "key_cache", "value": "value_cache", "scale": "scale_value", "num_key_value_heads": "num_kv_heads"},
    fused=False,
    available=lambda: yes() if library("libatb.so") else no(_NO_ATB),
)
_MLA = (replace(row, name=f"{row.name}-mla", arguments=_LATENT) for row in (_FIA, _FIA2))
HOST_OPS: Mapping[str, HostOp] = {row.name: row for row in (_FIA, _FIA2, *_MLA, _PAGED)}


def make_call(
    row: HostOp, out: Tensor, lengths: HostLengths, lse: Tensor | None = None, **arguments: Any
) -> partial[Any]:
    """Return the call of a row's op with all arguments except the lengths. The capture and every update share it.

    The call holds a workspace that is enough for any lengths that fit the block table.

    Args:
        out: [T, num_heads, value_dim], written.
        lengths: any lengths that the op takes.
        lse: float32 [T, num_heads, 1], written: the log-sum-exp of each row. None if the caller needs none.
        arguments: by the names in `row.arguments`; an argument left out has the op's default. query is
            [T, num_heads, head_dim]. key and value are caches, for the fused rows
            [num_blocks, block_size, num_kv_heads * head_dim].

    Raises:
        ConfigError: the op takes no argument of that name.
        RuntimeError: the op refuses the lengths, the shapes or the dtypes.
    """
    if unknown := set(arguments) - set(row.arguments):
        raise ConfigError(f"host op '{row.name}' takes no {', '.join(sorted(unknown))}; it takes {row.arguments}")
    named = {**{row.renamed.get(name, name): value for name, value in arguments.items()}, **row.fixed}
    if row.lse_flag:
        named[row.lse_flag] = lse is not None
    if row.fused and lse is None:  # op-plugin's document wants shape [1] if it is not computed
        lse = torch.empty(1, dtype=torch.float32, device=out.device)
    written = [out, lse] if row.fused else out
    asked = named if row.fused else {**named, "out": out}
    ops = getattr(torch.ops, row.namespace)
    if not row.fused:  # its workspace grows with the lengths
        room = arguments["block_table"].shape[1] * arguments["key"].shape[1]
        lengths = HostLengths(lengths.query_lens, [room] * len(lengths.seq_lens))
    workspace = row.with_lengths(partial(getattr(ops, row.workspace_op).default, **asked), lengths)()
    return partial(getattr(getattr(ops, row.op), row.overload), **named, workspace=workspace, out=written)
