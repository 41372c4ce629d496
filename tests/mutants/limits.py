"""Broken limits: which requests, rounds, caches, sizes and lowerings are taken, and what is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mutants.registry import mutant
from specgraph_run.decoder import Request
from specgraph_run.decoder.metrics import AcceptanceMetrics

from specgraph.draft import ProposeBatch


@mutant("cancel-ends-another", "specgraph_run.decoder.decoder:SpeculativeDecoder.cancel")
def cancel_ends_another(real: Any, self: Any, request_id: int) -> bool:
    """cancel() ends the first request that is not the one named."""
    states = (*self.rounds.running, *self._waiting)
    other = next((state.index for state in states if state.index != request_id), request_id)
    return real(self, other)


@mutant(
    "kv-blocks-needed", "specgraph_run.decoder.admission:blocks_needed", "specgraph_run.decoder.decoder:blocks_needed"
)
def one_block_too_many(real: Any, request: Request, *rest: Any) -> int:
    """A request whose last position is the last of a block is given one block more than it can touch."""
    return real(replace(request, max_tokens=request.max_tokens + 1), *rest)


@mutant("wrong-request-taken", "specgraph.validation:_take")
def any_seed_is_taken(real: Any, name: str, value: Any, kind: Any) -> Any:
    """A seed of more than 64 bits is taken, and fails when it is written to the device."""
    return value if name == "seed" else real(name, value, kind)


@mutant("metrics-without-drafts", "specgraph_run.decoder.metrics:AcceptanceMetrics.mean_acceptance_length")
def mean_over_nothing(real: Any, self: AcceptanceMetrics) -> float:
    """The mean acceptance length divides by the number of drafts where there are none."""
    return 1 + sum(self.accepted) / self.num_drafts


@mutant("cache-too-large", "specgraph.attention.caches:bytes_per_token")
def half_of_the_cache(real: Any, *args: Any) -> Any:
    """The size of KV caches counts the keys and leaves out the values."""
    return real(*args) // 2


@mutant("wrong-round-taken", "specgraph.draft.propose_passes:ProposePasses.hand_over")
def longer_tensors_are_cut(real: Any, self: Any, batch: ProposeBatch, *rest: Any) -> Any:
    """Hidden states of more rows than the round has are cut to it without a word."""
    rows, size = batch.sampled_token_ids.numel(), self._memory.aux_hidden.shape[1]
    return real(self, replace(batch, aux_hidden=batch.aux_hidden[:rows, :size]), *rest)


@mutant("wrong-round-taken-caches", "specgraph.draft.drafter:check_caches")
def any_cache_is_taken(real: Any, *args: Any) -> None:
    """KV caches are not compared with the head that they are for."""


@mutant("wrong-round-taken-empty-pass", "specgraph.capture.prefill:PrefillProgram.dispatch")
def an_empty_pass_is_padded(real: Any, self: Any, num_rows: Any) -> Any:
    """A prompt pass of no rows runs at the smallest size."""
    return real(self, max(num_rows, 1))


@mutant("default-sizes", "specgraph.config:capture_sizes")
def a_size_is_left_out(real: Any, most: int, asked: Any = None) -> tuple[int, ...]:
    """The default capture sizes leave out 64."""
    found = real(most, asked)
    return found if asked is not None else tuple(size for size in found if size != 64 or size == most)


@mutant("default-sizes-too-large", "specgraph.config:capture_sizes")
def large_size_is_dropped(real: Any, most: int, asked: Any = None) -> tuple[int, ...]:
    """A named capture size above max_num_requests is passed over without a word."""
    return real(most, asked if asked is None else [size for size in asked if size <= most])


@mutant("lowering-refused-wrongly", "specgraph.capture.lowering:refusal")
def missing_updates_are_overlooked(
    real: Any, lowering: Any, capabilities: Any, host_parameters: tuple[str, ...], collectives: Any
) -> str | None:
    """Attention with host parameters is captured where the platform can't update them."""
    return real(lowering, capabilities, () if lowering == "step" else host_parameters, collectives)


@mutant("lowering-refused-wrongly-collectives", "specgraph.capture.lowering:refusal")
def missing_collectives_are_overlooked(
    real: Any, lowering: Any, capabilities: Any, host_parameters: tuple[str, ...], collectives: Any
) -> str | None:
    """Collectives are captured by a platform that can't capture them."""
    return real(lowering, capabilities, host_parameters, "none" if lowering == "merged" else collectives)


@mutant("stale-padding-in-place", "specgraph.draft.propose_passes:ProposePasses._make")
def last_padded_request_stays(real: Any, self: Any, *args: Any) -> Any:
    """The last padded request of a batch in place stays as it was."""
    made = real(self, *args)
    return made if made.padding is None else replace(made, padding=made.padding[:-1])


@mutant("bound-tensors-read-elsewhere", "specgraph.draft.bound:BoundTensors.sliced")
def last_columns_of_bound_tensors(real: Any, self: Any, num_requests: int, query_len: int) -> Any:
    """A shorter round reads the last columns of the bound sampled tokens."""
    tokens = self._of.sampled_token_ids[:num_requests, -query_len:]
    return replace(real(self, num_requests, query_len), sampled_token_ids=tokens)
