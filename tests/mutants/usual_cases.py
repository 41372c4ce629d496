"""Bugs that usual shapes and batches do not show: passed by suite 1.1, failed by 1.2."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from mutants.draft_ops import change_arguments, replace_op
from mutants.registry import mutant
from torch import Tensor

from specgraph import ops
from specgraph.capture.read_set import ReadSetGuard
from specgraph.device import GraphPool
from specgraph.draft import BoundTensors
from specgraph.draft.host_lengths import HostRounds
from specgraph.draft.program import DraftProgram, computed_tokens
from specgraph.draft.stepwise import StepwiseProgram
from specgraph.engine.rounds import Rounds
from specgraph.ops import HostLengths, KVCache, Mask

PAGED: Any = import_module("specgraph.ops.paged_attention")
"""The module: `specgraph.ops` has an op of its name."""


@mutant("large-vocabulary", "kernel")
def ids_of_16_bits(patch: pytest.MonkeyPatch) -> None:
    """Verification keeps the target's most likely token in 16 bits."""

    def broken(real: Any, *args: Any) -> None:
        real(*args)
        tokens = args[-1].token_ids
        tokens.copy_(torch.where(tokens > 0, tokens % 65536, tokens))

    replace_op(patch, "verify_drafts", broken)


@mutant("large-vocabulary-embedding", "kernel", hazard="large-vocabulary")
def embedding_of_16_bits(patch: pytest.MonkeyPatch) -> None:
    """The fused embedding looks token ids up in 16 bits."""
    change_arguments(patch, "pair_linear", lambda ids, *rest: (ids % 65536, *rest))


@mutant("linears-of-many-rows", "kernel")
def rows_past_a_tile(patch: pytest.MonkeyPatch) -> None:
    """A fused norm and projection leaves the norm out for rows past the 96th."""

    def broken(real: Any, x: Tensor, norm: Any, *rest: Any) -> Tensor:
        return (
            torch.cat((real(x[:96], norm, *rest), real(x[96:], None, *rest)))
            if norm is not None
            else real(x, norm, *rest)
        )

    replace_op(patch, "norm_gate_up", broken)


@mutant("linears-of-many-rows-eps", "kernel", hazard="linears-of-many-rows")
def own_eps(patch: pytest.MonkeyPatch) -> None:
    """A fused norm has an eps of its own."""
    change_arguments(patch, "norm_linear", lambda x, norm, *rest: (x, norm and norm._replace(eps=1e-6), *rest))


@mutant("linears-of-many-rows-norm", "kernel", hazard="linears-of-many-rows")
def norm_of_both_or_none(patch: pytest.MonkeyPatch) -> None:
    """The first linear of a head normalises the hidden state only where the embedding is normalised too."""

    def change(ids: Any, hidden: Any, pair: Any, weight: Any) -> tuple[Any, ...]:
        return ids, hidden, pair._replace(hidden_norm=None) if pair.table_norm is None else pair, weight

    change_arguments(patch, "pair_linear", change)


@mutant("verify-rounds-probabilities", "kernel")
def probabilities_in_half(patch: pytest.MonkeyPatch) -> None:
    """Rejection sampling rounds the target's probabilities to the dtype of its logits."""
    change_arguments(patch, "verify_drafts", lambda logits, *rest: (logits.softmax(-1).float().log(), *rest))


@mutant("trees-of-one-shape", "kernel")
def mask_of_32_bits(patch: pytest.MonkeyPatch) -> None:
    """Tree attention takes bit i of the ancestor mask for key i + 32 too."""

    def change(query: Any, cache: Any, table: Any, lengths: Any, mask: Mask, *rest: Any) -> tuple[Any, ...]:
        words = mask.ancestors
        mask = mask if words is None else mask._replace(ancestors=words | words << 32)
        return query, cache, table, lengths, mask, *rest

    change_arguments(patch, "paged_attention", change)


@mutant("trees-of-one-shape-parents", "kernel", hazard="trees-of-one-shape")
def parents_of_the_first(patch: pytest.MonkeyPatch) -> None:
    """Verification follows the parents of request 0's tree in every request."""

    def change(logits: Any, tree: ops.TreeNodes, *rest: Any) -> tuple[Any, ...]:
        return logits, tree._replace(parents=tree.parents[:1].expand_as(tree.parents).contiguous()), *rest

    change_arguments(patch, "verify_tree", change)


@mutant("trees-of-one-shape-noise", "kernel", hazard="trees-of-one-shape")
def noise_of_the_row(patch: pytest.MonkeyPatch) -> None:
    """Verification of a tree draws with the noise of the row's own position instead of the token's after it."""

    def change(logits: Any, tree: Any, starts: Any, positions: Tensor, *rest: Any) -> tuple[Any, ...]:
        return logits, tree, starts, positions - 1, *rest

    change_arguments(patch, "verify_tree", change)


@mutant("nan-behind-the-last-key", "attention")
def weights_of_zero(patch: pytest.MonkeyPatch) -> None:
    """Values behind a request's last key, in its last block, are multiplied by a weight of 0 and added."""
    real = PAGED.attend_by_request

    def broken(query: Tensor, cache: KVCache, table: Tensor, lengths: HostLengths, *rest: Any) -> Tensor:
        out, first = real(query, cache, table, lengths, *rest), 0
        for request, (count, length) in enumerate(zip(*lengths, strict=True)):
            if length > 0:
                last = cache.value[table[request, (length - 1) // cache.block_size]]
                out[first : first + count] += 0 * last.float().sum().to(out.dtype)
            first += count
        return out

    patch.setattr(PAGED, "attend_by_request", broken)


@mutant("attention-own-scale", "attention")
def scale_of_the_head_size(patch: pytest.MonkeyPatch) -> None:
    """Attention over a window scales by the head size, whatever scale the layer has."""

    def broken(real: Any, query: Tensor, *args: Any, scale: float) -> Any:
        return real(query, *args, scale=query.shape[-1] ** -0.5 if args[3].is_windowed else scale)

    replace_op(patch, "paged_attention", broken)


@mutant("attention-many-blocks", "attention")
def block_numbers_of_10_bits(patch: pytest.MonkeyPatch) -> None:
    """Attention takes block numbers in 10 bits."""
    real = PAGED.attend_by_request

    def broken(query: Any, cache: Any, table: Tensor, *rest: Any) -> Tensor:
        return real(query, cache, table % 1024, *rest)

    patch.setattr(PAGED, "attend_by_request", broken)


@mutant("pool-closed-before-its-graphs", "platform")
def closed_pool_keeps(patch: pytest.MonkeyPatch) -> None:
    """A pool that was closed before its last graph never gives its memory back."""
    real = GraphPool.leave

    def broken(self: GraphPool, handle: Any) -> None:
        if not self.is_closed:
            real(self, handle)

    patch.setattr(GraphPool, "leave", broken)


@mutant("warm-up-over-live-requests", "engine")
def live_warm_up(patch: pytest.MonkeyPatch) -> None:
    """The warm-up before a capture runs over the requests that are in the buffers."""
    patch.setattr(DraftProgram, "make_inert", lambda self: None)


@mutant("small-tensor-unguarded", "engine")
def one_element(patch: pytest.MonkeyPatch) -> None:
    """The read-set guard lets tensors of one element pass."""
    real = ReadSetGuard._check

    def broken(self: ReadSetGuard, func: Any, tensor: Tensor) -> None:
        if tensor.numel() > 1:
            real(self, func, tensor)

    patch.setattr(ReadSetGuard, "_check", broken)


@mutant("bound-tensors-of-other-rounds", "engine")
def rows_of_the_largest(patch: pytest.MonkeyPatch) -> None:
    """Hidden states of bound tensors are read by the rows of the largest round."""
    real = BoundTensors.sliced

    def broken(self: BoundTensors, num_requests: int, query_len: int) -> Any:
        whole = self._of.aux_hidden.view(self._of.num_sampled.shape[0], -1, self._of.aux_hidden.shape[1])
        hidden = whole[:num_requests, :query_len].flatten(0, 1)
        return replace(real(self, num_requests, query_len), aux_hidden=hidden)

    patch.setattr(BoundTensors, "sliced", broken)


@mutant("bound-tensors-of-other-rounds-moved", "engine", hazard="bound-tensors-of-other-rounds")
def moved_unseen(patch: pytest.MonkeyPatch) -> None:
    """Bound tensors whose memory was exchanged are taken as they were."""
    patch.setattr(BoundTensors, "check_addresses", lambda self: None)


@mutant("inert-request-between-others", "engine")
def live_requests_counted(patch: pytest.MonkeyPatch) -> None:
    """Host lengths are read for as many requests as are live, not up to the last live one."""
    real = HostRounds.round

    def broken(self: HostRounds, batch: Any, buffers: Any, start_positions: Any, num_sampled: Any) -> Any:
        if start_positions is None:
            counts: list[int] = buffers.num_sampled[: batch.num_requests].tolist()
            live = sum(count > 0 for count in counts)
            start_positions, num_sampled = buffers.start_positions[:live].tolist(), counts[:live]
        return real(self, batch, buffers, start_positions, num_sampled)

    patch.setattr(HostRounds, "round", broken)


@mutant("round-rows-compacted", "engine")
def hidden_states_stay(patch: pytest.MonkeyPatch) -> None:
    """Hidden states stay behind when rows are compacted."""
    real = Rounds._compact

    def broken(self: Rounds) -> None:
        hidden = self.target.round.aux_hidden
        before = hidden.clone()
        real(self)
        hidden.copy_(before)

    patch.setattr(Rounds, "_compact", broken)


@mutant("module-past-rows-k", "engine", hazard="module-past-rows")
def modules_up_to_k(patch: pytest.MonkeyPatch) -> None:
    """A propose runs as many modules as it drafts tokens."""
    patch.setattr(StepwiseProgram, "num_steps", lambda self, batch: computed_tokens(batch))


@mutant("logprobs-of-other-logits", "engine")
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

    replace_op(patch, "adjust_logits", keep)
    replace_op(patch, "emitted_logprobs", other)
