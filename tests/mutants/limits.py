"""Broken limits: which requests, rounds, caches, sizes and lowerings are taken, and what is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from mutants.registry import mutant

import specgraph.capture.config
import specgraph.capture.lowering
import specgraph.draft.drafter
import specgraph.engine.admission
import specgraph.engine.blocks
import specgraph.engine.decoder
from specgraph.capture.prefill import PrefillProgram
from specgraph.draft import RoundBuffers
from specgraph.draft.bound import BoundTensors
from specgraph.draft.propose_passes import ProposePasses
from specgraph.engine import Request, SpeculativeDecoder
from specgraph.engine.metrics import AcceptanceMetrics
from specgraph.errors import ConfigError


@mutant("cancel-ends-another", "engine")
def cancel_ends_another(patch: pytest.MonkeyPatch) -> None:
    """cancel() ends the first request that is not the one named."""
    real = SpeculativeDecoder.cancel

    def cancel(self: Any, request_id: int) -> bool:
        states = (*self.rounds.running, *self._waiting)
        other = next((state.index for state in states if state.index != request_id), request_id)
        return real(self, other)

    patch.setattr(SpeculativeDecoder, "cancel", cancel)


@mutant("kv-blocks-needed", "engine")
def one_block_too_many(patch: pytest.MonkeyPatch) -> None:
    """A request whose last position is the last of a block is given one block more than it can touch."""
    real = specgraph.engine.admission.blocks_needed

    def needed(request: Request, config: Any, query_len: int) -> int:
        longer = replace(request, max_tokens=request.max_tokens + 1)
        return real(longer, config, query_len)

    for module in (specgraph.engine.admission, specgraph.engine.decoder):
        patch.setattr(module, "blocks_needed", needed)


@mutant("wrong-request-taken", "engine")
def any_seed_is_taken(patch: pytest.MonkeyPatch) -> None:
    """A seed of more than 64 bits is taken, and fails when it is written to the device."""
    real = Request.__post_init__

    def check(self: Request) -> None:
        try:
            real(self)
        except ConfigError as error:
            if "seed" not in str(error):
                raise

    patch.setattr(Request, "__post_init__", check)


@mutant("metrics-without-drafts", "engine")
def mean_over_nothing(patch: pytest.MonkeyPatch) -> None:
    """The mean acceptance length divides by the number of drafts where there are none."""
    mean = property(lambda self: 1 + sum(self.accepted) / self.num_drafts)
    patch.setattr(AcceptanceMetrics, "mean_acceptance_length", mean)


@mutant("cache-too-large", "engine")
def half_of_the_cache(patch: pytest.MonkeyPatch) -> None:
    """The size of KV caches counts the keys and leaves out the values."""
    real = specgraph.engine.blocks.bytes_per_token
    patch.setattr(specgraph.engine.blocks, "bytes_per_token", lambda *args: real(*args) // 2)


@mutant("wrong-round-taken", "engine")
def longer_tensors_are_cut(patch: pytest.MonkeyPatch) -> None:
    """Hidden states of more rows than the round has are cut to it without a word."""
    real = RoundBuffers.load

    def load(self: RoundBuffers, batch: Any, into: Any, *rest: Any) -> None:
        rows, size = into.aux_hidden.shape
        real(self, replace(batch, aux_hidden=batch.aux_hidden[:rows, :size]), into, *rest)

    patch.setattr(RoundBuffers, "load", load)


@mutant("wrong-round-taken-caches", "engine", hazard="wrong-round-taken")
def any_cache_is_taken(patch: pytest.MonkeyPatch) -> None:
    """KV caches are not compared with the head that they are for."""
    patch.setattr(specgraph.draft.drafter, "check_caches", lambda *args: None)


@mutant("wrong-round-taken-empty-pass", "engine", hazard="wrong-round-taken")
def an_empty_pass_is_padded(patch: pytest.MonkeyPatch) -> None:
    """A prompt pass of no rows runs at the smallest size."""
    real = PrefillProgram.dispatch
    patch.setattr(PrefillProgram, "dispatch", lambda self, num_rows: real(self, max(num_rows, 1)))


@mutant("default-sizes", "engine")
def a_size_is_left_out(patch: pytest.MonkeyPatch) -> None:
    """The default capture sizes leave out 64."""
    real = specgraph.capture.config.capture_sizes

    def sizes(most: int, asked: Any = None) -> tuple[int, ...]:
        found = real(most, asked)
        return found if asked is not None else tuple(size for size in found if size != 64 or size == most)

    patch.setattr(specgraph.capture.config, "capture_sizes", sizes)


@mutant("default-sizes-zero", "engine", hazard="default-sizes")
def size_zero_is_taken(patch: pytest.MonkeyPatch) -> None:
    """A named capture size of 0 is passed over without a word."""
    real = specgraph.capture.config.capture_sizes

    def sizes(most: int, asked: Any = None) -> tuple[int, ...]:
        return real(most, asked if asked is None else [size for size in asked if size > 0])

    patch.setattr(specgraph.capture.config, "capture_sizes", sizes)


@mutant("lowering-refused-wrongly", "engine")
def missing_updates_are_overlooked(patch: pytest.MonkeyPatch) -> None:
    """Attention with host parameters is captured where the platform can't update them."""
    real = specgraph.capture.lowering.refusal

    def refusal(lowering: Any, capabilities: Any, host_parameters: tuple[str, ...]) -> str | None:
        return real(lowering, capabilities, () if lowering == "step" else host_parameters)

    patch.setattr(specgraph.capture.lowering, "refusal", refusal)


@mutant("stale-padding-in-place", "engine")
def last_padded_request_stays(patch: pytest.MonkeyPatch) -> None:
    """The last padded request of a batch in place stays as it was."""
    real = ProposePasses._make

    def make(self: Any, *args: Any) -> Any:
        made = real(self, *args)
        return made if made.padding is None else replace(made, padding=made.padding[:-1])

    patch.setattr(ProposePasses, "_make", make)


@mutant("bound-tensors-read-elsewhere", "engine")
def last_columns_of_bound_tensors(patch: pytest.MonkeyPatch) -> None:
    """A shorter round reads the last columns of the bound sampled tokens."""
    real = BoundTensors.sliced

    def sliced(self: Any, num_requests: int, query_len: int) -> Any:
        tokens = self._of.sampled_token_ids[:num_requests, -query_len:]
        return replace(real(self, num_requests, query_len), sampled_token_ids=tokens)

    patch.setattr(BoundTensors, "sliced", sliced)
