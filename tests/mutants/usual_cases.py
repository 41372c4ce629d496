"""Bugs that usual shapes and batches do not show: passed by suite 1.1, failed by 1.2."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mutants.registry import mutant, replace_function
from specgraph_run.decoder.rounds import Rounds
from torch import Tensor

from specgraph import ops
from specgraph.capture.read_set import ReadSetGuard
from specgraph.device import GraphPool
from specgraph.draft import BoundTensors
from specgraph.draft.host_lengths import HostNumbersReader
from specgraph.draft.program import computed_tokens
from specgraph.ops import HostLengths, KVCache, Mask

PAGED: Any = import_module("specgraph.ops.paged_attention")
"""The module: `specgraph.ops` has an op of its name."""


@mutant("large-vocabulary", "specgraph_run.decoder.ops:verify_drafts")
def ids_of_16_bits(real: Any, *args: Any) -> None:
    """Verification keeps the target's most likely token in 16 bits."""
    real(*args)
    tokens = args[-1].token_ids
    tokens.copy_(torch.where(tokens > 0, tokens % 65536, tokens))


@mutant("large-vocabulary-embedding", "specgraph_models.ops:pair_linear")
def embedding_of_16_bits(real: Any, ids: Any, *rest: Any) -> Any:
    """The fused embedding looks token ids up in 16 bits."""
    return real(ids % 65536, *rest)


@mutant("linears-of-many-rows", "specgraph_models.ops:norm_gate_up")
def rows_past_a_tile(real: Any, x: Tensor, norm: Any, *rest: Any) -> Tensor:
    """A fused norm and projection leaves the norm out for rows past the 96th."""
    return (
        torch.cat((real(x[:96], norm, *rest), real(x[96:], None, *rest))) if norm is not None else real(x, norm, *rest)
    )


@mutant("linears-of-many-rows-eps", "specgraph.ops:norm_linear")
def own_eps(real: Any, x: Any, norm: Any, *rest: Any) -> Any:
    """A fused norm has an eps of its own."""
    return real(x, norm and norm._replace(eps=1e-6), *rest)


@mutant("linears-of-many-rows-norm", "specgraph_models.ops:pair_linear")
def norm_of_both_or_none(real: Any, ids: Any, hidden: Any, pair: Any, weight: Any) -> Any:
    """The first linear of a head normalises the hidden state only where the embedding is normalised too."""
    return real(ids, hidden, pair._replace(hidden_norm=None) if pair.table_norm is None else pair, weight)


@mutant("verify-rounds-probabilities", "specgraph_run.decoder.ops:verify_drafts")
def probabilities_in_half(real: Any, logits: Any, *rest: Any) -> Any:
    """Rejection sampling rounds the target's probabilities to the dtype of its logits."""
    return real(logits.softmax(-1).float().log(), *rest)


@mutant("trees-of-one-shape", "specgraph.ops:paged_attention")
def mask_of_32_bits(
    real: Any, query: Any, cache: Any, table: Any, lengths: Any, mask: Mask, *rest: Any, **options: Any
) -> Any:
    """Tree attention takes bit i of the ancestor mask for key i + 32 too."""
    words = mask.ancestors
    mask = mask if words is None else mask._replace(ancestors=words | words << 32)
    return real(query, cache, table, lengths, mask, *rest, **options)


@mutant("trees-of-one-shape-parents", "specgraph_run.decoder.ops:verify_tree")
def parents_of_the_first(real: Any, logits: Any, tree: ops.TreeNodes, *rest: Any) -> Any:
    """Verification follows the parents of request 0's tree in every request."""
    return real(logits, tree._replace(parents=tree.parents[:1].expand_as(tree.parents).contiguous()), *rest)


@mutant("trees-of-one-shape-noise", "specgraph_run.decoder.ops:verify_tree")
def noise_of_the_row(real: Any, logits: Any, tree: Any, starts: Any, positions: Tensor, *rest: Any) -> Any:
    """Verification of a tree draws with the noise of the row's own position instead of the token's after it."""
    return real(logits, tree, starts, positions - 1, *rest)


@mutant("nan-behind-the-last-key", "specgraph.ops.paged_attention:attend_by_request")
def weights_of_zero(
    real: Any, query: Tensor, cache: KVCache, table: Tensor, lengths: HostLengths, *rest: Any
) -> Tensor:
    """Values behind a request's last key, in its last block, are multiplied by a weight of 0 and added."""
    out, first = real(query, cache, table, lengths, *rest), 0
    for request, (count, length) in enumerate(zip(*lengths, strict=True)):
        if length > 0:
            last = cache.value[table[request, (length - 1) // cache.block_size]]
            out[first : first + count] += 0 * last.float().sum().to(out.dtype)
        first += count
    return out


@mutant("attention-own-scale", "specgraph.ops:paged_attention")
def scale_of_the_head_size(real: Any, query: Tensor, *args: Any, scale: float) -> Any:
    """Attention over a window scales by the head size, whatever scale the layer has."""
    return real(query, *args, scale=query.shape[-1] ** -0.5 if args[3].has_window_or_sinks else scale)


@mutant("attention-many-blocks", "specgraph.ops.paged_attention:attend_by_request")
def block_numbers_of_10_bits(real: Any, query: Any, cache: Any, table: Tensor, *rest: Any) -> Tensor:
    """Attention takes block numbers in 10 bits."""
    return real(query, cache, table % 1024, *rest)


@mutant("pool-closed-before-its-graphs", "specgraph.device.pool:GraphPool.leave")
def closed_pool_keeps(real: Any, self: GraphPool, handle: Any) -> None:
    """A pool that was closed before its last graph never gives its memory back."""
    if not self.is_closed:
        real(self, handle)


@mutant("warm-up-over-live-requests", "specgraph.draft.program:DraftProgram.make_inert")
def live_warm_up(real: Any, self: Any) -> None:
    """The warm-up before a capture runs over the requests that are in the buffers."""


@mutant("small-tensor-unguarded", "specgraph.capture.read_set:ReadSetGuard._check")
def one_element(real: Any, self: ReadSetGuard, func: Any, tensor: Tensor) -> None:
    """The read-set guard lets tensors of one element pass."""
    if tensor.numel() > 1:
        real(self, func, tensor)


@mutant("bound-tensors-of-other-rounds", "specgraph.draft.bound:BoundTensors.sliced")
def rows_of_the_largest(real: Any, self: BoundTensors, num_requests: int, query_len: int) -> Any:
    """Hidden states of bound tensors are read by the rows of the largest round."""
    whole = self._of.aux_hidden.view(self._of.num_sampled.shape[0], -1, self._of.aux_hidden.shape[1])
    hidden = whole[:num_requests, :query_len].flatten(0, 1)
    return replace(real(self, num_requests, query_len), aux_hidden=hidden)


@mutant("bound-tensors-of-other-rounds-moved", "specgraph.draft.bound:BoundTensors.check_addresses")
def moved_unseen(real: Any, self: Any) -> None:
    """Bound tensors whose memory was exchanged are taken as they were."""


@mutant("inert-request-between-others", "specgraph.draft.host_lengths:HostNumbersReader.read")
def live_requests_counted(
    real: Any, self: HostNumbersReader, batch: Any, buffers: Any, start_positions: Any, num_sampled: Any
) -> Any:
    """Host lengths are read for as many requests as are live, not up to the last live one."""
    if start_positions is None:
        counts: list[int] = buffers.num_sampled[: batch.num_requests].tolist()
        live = sum(count > 0 for count in counts)
        start_positions, num_sampled = buffers.start_positions[:live].tolist(), counts[:live]
    return real(self, batch, buffers, start_positions, num_sampled)


@mutant("tokens-behind-the-sampled", "specgraph.draft.chain:forward_first")
def tokens_of_all_columns(real: Any, head: Any, b: Any, make_attend: Any) -> Any:
    """Draft step 0 of a chain takes the tokens of all columns, those behind `num_sampled` too."""
    inputs = b.inputs

    def combine(aux_hidden: Tensor) -> Tensor:
        b.token_ids.copy_(inputs.sampled_token_ids.flatten())
        return head.combine(aux_hidden)

    return real(SimpleNamespace(combine=combine, forward=head.forward), b, make_attend)


@mutant("round-rows-compacted", "specgraph_run.decoder.rounds:Rounds._compact")
def hidden_states_stay(real: Any, self: Rounds) -> None:
    """Hidden states stay behind when rows are compacted."""
    hidden = self.target.shared.aux_hidden
    before = hidden.clone()
    real(self)
    hidden.copy_(before)


@mutant("module-past-rows-k", "specgraph.draft.modules:ModulesProgram.num_steps")
def modules_up_to_k(real: Any, self: Any, batch: Any) -> int:
    """A propose runs as many modules as it drafts tokens."""
    return computed_tokens(batch)


@mutant("logprobs-of-other-logits")
def logprobs_after_the_parameters(patch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of generated tokens are those of the logits after bias and penalties."""
    adjusted: list[Tensor] = []

    def keep(real: Any, *args: Any, **options: Any) -> Any:
        out = real(*args, **options)
        adjusted[:] = [args[0] if out is None else out]
        return out

    def other(real: Any, logits: Tensor, *rest: Any) -> None:
        fits = adjusted and adjusted[0].numel() == logits.numel()
        real(adjusted[0].view_as(logits) if fits else logits, *rest)

    replace_function(patch, "specgraph_run.decoder.ops:adjust_logits", keep)
    replace_function(patch, "specgraph_run.decoder.ops:emitted_logprobs", other)
