"""Paged attention with host parameters: each captured op in a task group of its own, rewritten by the update plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specgraph import ops
from specgraph.attention import AttentionLayer, AttentionMetadata, ForwardContext, HostLengths, KVCache, TaskKey
from specgraph.attention.context_parallel import all_heads, lengths_by_row, own_heads, own_slots, table_by_row
from specgraph.attention.paged import NO_ANCESTOR_MASK
from specgraph.device import Support, no, yes
from specgraph.errors import ConfigError, UnsupportedError, UpdateError
from specgraph.ops import NewRows
from specgraph.parallel import ContextParallel
from specgraph_npu.host_ops import HOST_OPS, HostOp, make_call

if TYPE_CHECKING:
    from specgraph_npu.platform import NpuPlatform


@dataclass(frozen=True)
class HostOpAttention:
    """Attention through one op of `HOST_OPS`. The lengths are host parameters; all else is read on the device."""

    platform: NpuPlatform
    row: HostOp
    host_parameters: tuple[str, ...] = ("query_lens", "seq_lens")
    preferred_block_size: int = 128
    cache_dtypes: tuple[torch.dtype, ...] = ()
    after_advance = None

    @property
    def name(self) -> str:
        return self.row.name

    def supports(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """See `AttentionBackend.supports`. If public sources differ about the op, the strictest counts (README.md)."""
        latent, heads, dim = self.row.is_latent, layer.num_heads, layer.head_dim
        if layer.latent_first:
            return no("latent rows in an engine's order, [latent, rotated part]")
        if layer.latent != latent:
            return no("it takes latent layers (MLA) only" if latent else "latent layers; the rows '...-mla' take them")
        if (layer.window or layer.sinks is not None) and (latent or not self.row.fused or not layer.causal):
            return no("a sliding window, or sinks; 'fia' and 'fia-v2' take such layers where they are causal")
        if layer.sinks is not None and "learnable_sink" not in self.row.arguments:
            return no("attention sinks; it takes none: 'fia-v2' does")
        if layer.ranks is not None and (latent or not self.row.fused or layer.window or layer.sinks is not None):
            return no("keys that ranks share: 'fia' and 'fia-v2' take them, without latents, windows and sinks")
        block_size //= layer.context_size
        if not self.row.fused:
            return _paged_support(layer, dtype, block_size)
        rope = 0 if layer.rotary is None else layer.rotary.shape[1]
        shape = f"{heads} heads of {dim} over {layer.num_kv_heads} key heads"
        if dtype is not torch.bfloat16 and not (latent and dtype is torch.float16):
            return no(f"the layers are {str(dtype).removeprefix('torch.')}; it takes bfloat16: choose that dtype")
        if latent:
            if (layer.num_kv_heads, rope, dim) != (1, 64, 576) or heads.bit_count() != 1 or heads > 128:
                return no(f"{shape}, {rope} rotated; it takes one key head of 512 + 64, and 1, 2, 4 ... 128 heads")
        elif dim != 128 and (dim != 192 or heads != layer.num_kv_heads or layer.window or layer.sinks is not None):
            return no(f"{shape}; it takes a head_dim of 128, or of 192 without grouped heads, windows and sinks")
        sizes = (16, 128) if latent else (128, 256, 384, 512)
        fits = block_size in sizes
        return yes() if fits else no(f"KV blocks of {block_size} tokens; it takes {sizes}: leave block_size to it")

    def supports_trees(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """See `AttentionBackend.supports_trees`."""
        return NO_ANCESTOR_MASK

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Return the constants that captured ops read, by name. They belong to the read set."""
        return {"attention.causal_mask": self.causal_mask}

    def forward(
        self, layer: AttentionLayer, index: int, query: Tensor, key: Tensor, value: Tensor, cache: KVCache,
        context: ForwardContext,
    ) -> Tensor:  # fmt: skip
        """See `AttentionBackend.forward`. Raises UpdateError if host lengths are missing, or don't fit the rows or the
        block table."""
        metadata, lengths, row = context.metadata, context.lengths, self.row
        if lengths is None:
            raise UpdateError(f"attention '{self.name}' takes host lengths; step {context.step} came without")
        ranks, dtype = layer.ranks, query.dtype
        if ranks is not None:
            query = all_heads(query, ranks)
        by_row = ranks is not None or not row.fused
        table = table_by_row(metadata, lengths, query.shape[0]) if by_row else metadata.block_table
        arguments: dict[str, Any] = {"block_table": table}
        if row.fused:
            arguments["block_size"] = cache.block_size
        if row.is_latent:
            arguments |= store_latent(layer, query, key, value, cache, metadata)
        else:
            new = NewRows(key, value, layer.rotary, metadata.positions, own_slots(metadata.slot_mapping, ranks))
            arguments["query"] = ops.rotate_and_store(query, new, cache)
            arguments |= {n: c.flatten(2) if row.fused else c for n, c in zip(("key", "value"), cache, strict=True)}
        out = torch.empty_like(arguments["query"])
        masked = not by_row and layer.causal and (metadata.query_len > 1 or layer.window is not None)
        if masked:
            arguments |= {"sparse_mode": 3, "atten_mask": self.causal_mask}
        if layer.window is not None:
            arguments |= {"sparse_mode": 4, "pre_tokens": layer.window - 1, "next_tokens": 0}
        if layer.sinks is not None:
            arguments["learnable_sink"] = layer.sinks.to(query.dtype)
        room = table.shape[1] * cache.block_size * layer.context_size
        checked = partial(_checked, num_rows=query.shape[0], room=room, masked=masked)
        if by_row:
            checked = partial(_by_row, checked, causal=layer.causal, ranks=ranks)
        first = checked(lengths)
        lse = None if ranks is None else torch.empty(*out.shape[:2], 1, dtype=torch.float32, device=out.device)
        call = make_call(
            row, out, first, lse, **arguments, num_heads=out.shape[1], num_key_value_heads=layer.num_kv_heads,
            scale=layer.scale,
        )  # fmt: skip
        if context.updates is None:
            row.with_lengths(call, first)()
        else:
            with self.platform.task_group() as group:
                row.with_lengths(call, first)()
            weak_reference = self.platform.torch_npu._C._weak_ref_tensor  # the graph's pool may reuse the call's memory
            call = partial(call.func, **tree_map_only(Tensor, weak_reference, call.keywords))
            group.issue = row.with_lengths(call, first)
            task, issue = TaskKey(context.step, index), group.issue_in_update
            context.updates.add(task, group, lambda now: partial(issue, row.with_lengths(call, checked(now))))
        if masked:
            _zero_inert(out, metadata, lengths)
        if ranks is not None and lse is not None:  # the op gives inf for a row without keys
            part = torch.cat((out.float(), torch.where(lse == float("inf"), float("-inf"), lse)), dim=-1)
            return own_heads(part, layer.num_heads, ranks, dtype)
        pad = layer.head_dim - out.shape[-1]  # the rotated part of a latent row
        return torch.nn.functional.pad(out, (pad, 0)) if pad else out

    @cached_property
    def causal_mask(self) -> Tensor:
        """bool [2048, 2048], True above the diagonal: the mask that sparse modes 3 and 4 require. It is never
        written again."""
        return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(self.platform.device)


def _zero_inert(out: Tensor, metadata: AttentionMetadata, lengths: HostLengths) -> None:
    """Zero the rows of inert requests, which attended to the null block."""
    if out.shape[0] == metadata.num_requests * metadata.query_len:
        per_request = out.view(metadata.num_requests, metadata.query_len, *out.shape[1:])
        per_request.masked_fill_((metadata.seq_lens == 0).view(-1, 1, 1, 1), 0)
    else:  # a ragged batch, which only eager passes have
        for part, keys in zip(out.split(list(lengths.query_lens)), lengths.seq_lens, strict=True):
            if not keys:
                part.zero_()


def _by_row(
    checked: Callable[[HostLengths], HostLengths], lengths: HostLengths, causal: bool, ranks: ContextParallel | None
) -> HostLengths:
    """Check the lengths, and return them with every row as a request of its own; see `lengths_by_row`."""
    return lengths_by_row(checked(lengths), causal, ranks)


def _paged_support(layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
    """Return whether ATB's paged attention takes this layer."""
    if dtype not in (torch.bfloat16, torch.float16):
        return no(f"the layers are {str(dtype).removeprefix('torch.')}; it takes bfloat16 and float16")
    if layer.head_dim > 256 or block_size % 16 or layer.head_dim * block_size > 128 * 128:
        sizes = f"a head_dim of {layer.head_dim} with KV blocks of {block_size} tokens"
        return no(f"{sizes}; it takes a head_dim up to 256, blocks of 16, 32, ... tokens, at most 16384 as product")
    return yes()


def _checked(lengths: HostLengths, num_rows: int, room: int, masked: bool) -> HostLengths:
    """Return the lengths in the form that the op takes. Raises UpdateError if they don't fit it.

    Args:
        num_rows: the rows of the op's query.
        room: the tokens that one row of its block table has room for.
        masked: the op runs in sparse mode 3 or 4, which refuses a request with fewer keys than rows. An inert request
            then gets as many keys as rows. It reads them from the null block, and its output is not used.
    """
    if sum(lengths.query_lens) != num_rows:
        raise UpdateError(f"query_lens {lengths.query_lens} are {sum(lengths.query_lens)} rows; the op has {num_rows}")
    taken: list[int] = []
    for rows, keys in zip(lengths.query_lens, lengths.seq_lens, strict=True):
        if keys > room:
            raise UpdateError(f"a request sees {keys} keys; its row of the block table holds {room} tokens")
        if masked and 0 < keys < rows:
            raise UpdateError(f"a request of {rows} rows sees {keys} keys: its own rows are not among them")
        taken.append(keys or (rows if masked else 0))
    return HostLengths(lengths.query_lens, taken)


def store_latent(
    layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata
) -> dict[str, Any]:
    """Rotate and store the rows of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A row is [rotated part, latent], of rope_dim columns (as many as the rotary table has) and latent_dim columns. query
    is [T, num_heads, rope_dim + latent_dim]. key and value are the same tensor, [T, 1, rope_dim + latent_dim]. The op
    takes the two parts apart, so the cache's memory holds all latents first and all rotated parts after them:
    `cache.key[block]` is not the content of a block. The first rope_dim columns of the layer's output are 0.

    Returns:
        The op's tensor arguments, by name.
    """
    rope = 0 if layer.rotary is None else layer.rotary.shape[1]
    if not layer.latent or layer.rotary is None or layer.num_kv_heads != 1 or rope >= layer.head_dim:
        raise UnsupportedError(
            "latent attention takes one key head of a rotated part and a latent; this layer has "
            f"{layer.num_kv_heads} of {layer.head_dim}, {rope or 'none'} rotated: use 'fia'"
        )
    cells = cache.key[..., 0].numel()
    parts = cache.key.view(-1).split((cells * (layer.head_dim - rope), cells * rope))
    latent, key_rope = (part.view(*cache.key.shape[:3], -1) for part in parts)
    rows = key[..., :rope].contiguous(), value[..., rope:].contiguous()
    new = NewRows(*rows, layer.rotary, metadata.positions, metadata.slot_mapping)
    query_rope = ops.rotate_and_store(query[..., :rope].contiguous(), new, KVCache(key_rope, latent))
    ropes, latent = {"query_rope": query_rope, "key_rope": key_rope.flatten(2)}, latent.flatten(2)
    return {"query": query[..., rope:].contiguous(), "key": latent, "value": latent, **ropes}


def make_attention(platform: NpuPlatform, name: str) -> HostOpAttention:
    """Return attention through the op `name` of `HOST_OPS`.

    Raises:
        ConfigError: there is no such op.
        UnsupportedError: a library that the op needs is not installed.
    """
    row = HOST_OPS.get(name)
    if row is None:
        raise ConfigError(f"no attention '{name}' on NPU; there are {', '.join(HOST_OPS)}")
    if not (support := row.available()):
        raise UnsupportedError(f"attention '{name}' is not available: {support.reason}")
    return HostOpAttention(platform, row)
