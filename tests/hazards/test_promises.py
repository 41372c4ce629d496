"""Promises to a host engine: captures leave KV alone, bound tensors are read, penalties hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from specgraph_conformance.case import Absent
from specgraph_conformance.draft_comparison import away_from_the_end, rig
from specgraph_conformance.draft_rig import make_batches, make_config, random_caches
from specgraph_conformance.rig import expect_equal, on_host
from specgraph_conformance.tiny_models import PROGRAMS, VOCAB, Head, make_head
from specgraph_run.decoder import allocate_sampling
from torch import Tensor

from specgraph.attention import KVCache
from specgraph.device import Platform
from specgraph.draft import DraftConfig, Drafter, ProposeBatch
from specgraph.errors import UnsupportedError


def _drafter(head: Head, caches: list[KVCache], platform: Platform, config: DraftConfig, **options: Any) -> Drafter:
    """Make a drafter that has captured nothing yet.

    Raises:
        Absent: the platform can't run this lowering. The message is its reason.
    """
    try:
        return Drafter(head, caches, platform, config, **options)
    except UnsupportedError as error:
        raise Absent(str(error)) from error


@pytest.mark.hazard("warm-up-over-live-requests")
def test_captures_write_no_kv(platform: Platform, seed: int) -> None:
    """Capturing after an engine has written its first round changes no key and no value, though warm-ups run."""
    config = make_config(decode="auto")
    head = make_head("eagle", 1, platform.device)
    caches = random_caches(head, config, platform.device, seed)
    made = _drafter(head, caches, platform, config)
    inputs = made.inputs(4)
    inputs.num_sampled.fill_(2)
    inputs.start_positions.copy_(torch.tensor([3, 20, 40, 50]))
    inputs.block_table.copy_(torch.arange(1, 1 + inputs.block_table.numel()).view_as(inputs.block_table) % 20 + 1)
    before = [(on_host(cache.key)[1:], on_host(cache.value)[1:]) for cache in caches]
    made.capture()
    platform.synchronize()
    for cache, (key, value) in zip(caches, before, strict=True):
        expect_equal(on_host(cache.key)[1:], key, "keys after the capture")
        expect_equal(on_host(cache.value)[1:], value, "values after the capture")
    made.close()


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.hazard("tokens-behind-the-sampled")
def test_tokens_behind_the_sampled(platform: Platform, kind: str, seed: int) -> None:
    """Tokens behind num_sampled are not read, and none of an inert request: -1 there gives the drafts and the KV that
    tokens of the vocabulary give."""
    made = rig(platform, make_config(decode="auto", prefill="eager", capture_sizes=(4,)), "paged", kind)
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [4])
    batch = away_from_the_end(made.config, replace(batch, num_sampled=[made.config.query_len, 0, 2, 1]))
    handed, seen = batch.on(platform.device, made.head.dtype), list[Tensor]()
    state = [*made.drafter.shared.named_tensors("").values(), *(part for cache in made.caches for part in cache)]
    before = [tensor.clone() for tensor in state]
    for tokens in (handed.sampled_token_ids, batch.sampled_token_ids.to(platform.device)):
        for tensor, values in zip(state, before, strict=True):
            tensor.copy_(values)
        drafts = made.drafter.propose(
            replace(handed, sampled_token_ids=tokens),
            host_start_positions=batch.start_positions,
            host_num_sampled=batch.num_sampled,
        )
        keys = [part.double().flatten() for cache in made.host_caches() for part in cache]
        seen.append(torch.cat([on_host(drafts.token_ids)[[0, 2, 3]].double().flatten(), *keys]))
    expect_equal(seen[0], seen[1], "drafts and KV, with -1 behind the sampled tokens,")


@pytest.mark.parametrize("lowering", ["step", "merged"])
@pytest.mark.hazard("drafts-not-penalised")
def test_penalties_count_earlier_drafts(platform: Platform, lowering: str, seed: int) -> None:
    """A token that a bias makes the likeliest of all is drafted once where its penalty for a second time is larger, and
    once more by the next propose: drafts count in the propose that drafts them."""
    config = replace(make_config(decode=lowering, k=4), sampled=True, draft_sampling="greedy")
    head = make_head("eagle", 1, platform.device)
    asked = allocate_sampling(config.max_num_requests, VOCAB, platform.device)
    wanted = torch.tensor([7, 19, 30, 52])
    asked.bias[torch.arange(4), wanted] = 500.0
    asked.presence_penalty.fill_(900.0)
    made = _drafter(head, random_caches(head, config, platform.device, seed), platform, config, sampling=asked)
    made.capture()
    (batch,) = make_batches(config, head.aux_size, seed, [4])
    numbers: dict[str, Any] = {"host_start_positions": batch.start_positions, "host_num_sampled": batch.num_sampled}
    drafts, again = (
        on_host(made.propose(batch.on(platform.device, head.dtype), **numbers).token_ids) for _ in range(2)
    )
    expect_equal(drafts[:, 0], wanted, "the first drafts, to which a bias was given")
    for r in range(4):
        assert len(set(drafts[r].tolist())) == 4, f"request {r} drafts a token twice in spite of its penalty"
    expect_equal(again, drafts, "the drafts of the same round, once more")
    made.close()


@pytest.mark.hazard("bound-tensors-of-other-rounds")
def test_bound_rounds_of_other_k(platform: Platform, seed: int) -> None:
    """Bound tensors give the drafts of handed-over ones also after rounds of fewer rows than the largest."""

    def write(into: ProposeBatch, engines: ProposeBatch, values: dict[str, Tensor]) -> None:
        into.block_table.zero_()
        for name, tensor in values.items():
            view = getattr(into, name)
            (view[:, : tensor.shape[1]] if name == "block_table" else view).copy_(tensor)

    _compare_bound(platform, write, "drafts of bound tensors after a round of two rows", seed)


@pytest.mark.hazard("bound-tensors-read-elsewhere")
def test_engines_write_their_own_bound_tensors(platform: Platform, seed: int) -> None:
    """A propose reads the first columns and the first packed rows of the tensors themselves that an engine bound, also
    after rounds of fewer rows than the largest."""

    def write(into: ProposeBatch, engines: ProposeBatch, values: dict[str, Tensor]) -> None:
        engines.block_table.zero_()
        engines.sampled_token_ids.fill_(1)
        engines.aux_hidden.zero_()
        for name, tensor in values.items():
            getattr(engines, name)[tuple(map(slice, tensor.shape))] = tensor

    _compare_bound(platform, write, "drafts of tensors that the engine wrote itself", seed)


def _compare_bound(
    platform: Platform,
    write: Callable[[ProposeBatch, ProposeBatch, dict[str, Tensor]], None],
    what: str,
    seed: int,
) -> None:
    """Compare the drafts of one batch, handed over and through bound tensors. The batch has two rows per request, and
    the bound tensors have four.

    Args:
        write: writes the batch into the bound tensors. It is called with their view for this batch, the whole tensors,
            and the batch's values by name.
    """
    config = make_config(decode="auto", k=3, draft_schedule={2: 3, 4: 1})
    head = make_head("eagle", 1, platform.device)
    (batch,) = make_batches(make_config(k=1), head.aux_size, seed, [3])
    batch = replace(batch, aux_hidden=9 * batch.aux_hidden)  # make drafts depend on the hidden states
    handed, drafts = batch.on(platform.device, head.dtype), list[Tensor]()
    names = ("sampled_token_ids", "num_sampled", "start_positions", "aux_hidden", "block_table")
    for binds in (False, True):
        made = _drafter(head, random_caches(head, config, platform.device, seed), platform, config)
        given = handed
        if binds:
            own = made.inputs(config.max_num_requests)
            engines = ProposeBatch(**{name: getattr(own, name).clone() for name in names})
            given = made.inputs(3, 2, bound=made.bind(engines))
            made.capture()
            write(given, engines, {name: getattr(handed, name) for name in names})
        else:
            made.capture()
        drafts.append(on_host(made.propose(given).token_ids))
        made.close()
    expect_equal(drafts[1], drafts[0], what)
