"""Sizes and inputs of a drafter: the defaults, and the refusals before any device work."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from specgraph_conformance.draft_comparison import rig
from specgraph_conformance.draft_rig import HostBatch, make_batches, make_config, random_caches
from specgraph_conformance.rig import expect_equal, expect_refusal
from specgraph_conformance.tiny_models import MAX_POSITIONS, make_head
from torch import Tensor

from specgraph.attention import KVCache
from specgraph.device import Platform
from specgraph.draft import DraftConfig, Drafter


@pytest.mark.hazard("default-sizes")
def test_default_sizes(platform: Platform) -> None:
    """The default captured numbers of requests are 1, 2, 4, multiples of 8 to 64, multiples of 16 and the maximum;
    prompt passes have powers of two from 16 to 512 or max_model_len."""
    for most in range(1, 300):
        steps = {n for n in range(1, most) if n in (1, 2, 4) or (n <= 64 and n % 8 == 0) or n % 16 == 0}
        config = DraftConfig(num_speculative_tokens=2, max_num_requests=most, max_model_len=64)
        assert config.sizes == tuple(sorted(steps | {most})), f"capture sizes {config.sizes} up to {most} requests"
    for longest in (16, 17, 33, 128, 511, 512, 513, 5000):
        powers = [n for n in (16, 32, 64, 128, 256) if n < longest]
        config = DraftConfig(num_speculative_tokens=2, max_num_requests=1, max_model_len=longest)
        wanted = (*powers, min(longest, 512))
        assert config.prefill_rows == wanted, f"prefill sizes {config.prefill_rows} up to {longest} tokens"


@pytest.mark.hazard("default-sizes")
def test_wrong_sizes_refused(platform: Platform) -> None:
    """Sizes outside of the limits, named twice, none at all, or short of the largest batch are one ConfigError that
    names them; in range they are taken as named."""
    for name, limit in (("capture_sizes", "max_num_requests"), ("prefill_sizes", "max_model_len")):
        small: dict[str, Any] = {"num_speculative_tokens": 2, "max_num_requests": 8, "max_model_len": 8}
        for wrong, said in (([0, 8], r"\[0\]"), ([8, 9], rf"\[9\].*1\.\.8.*{limit}"), ([8, 8], "twice"), ([], "empty")):
            given: dict[str, Any] = {**small, name: wrong}
            expect_refusal(lambda given=given: DraftConfig(**given), f"{name} {wrong} up to 8", said)
        given = {**small, name: [8, 1, 3]}
        made = DraftConfig(**given)
        assert (made.sizes if name == "capture_sizes" else made.prefill_rows) == (1, 3, 8)
    short: dict[str, Any] = {"max_num_requests": 4, "capture_sizes": (1, 3)}
    what = "a largest size of 3 for batches of up to 4 without a fallback"
    expect_refusal(lambda: make_config(decode="merged", fallback="error", **short), what, r"\b3\b.*\b4\b")
    assert make_config(decode="merged", fallback="eager", **short).sizes == (1, 3)
    assert make_config(decode="eager", fallback="error", **short).sizes == (1, 3)


@pytest.mark.hazard("default-sizes")
def test_past_the_largest_size(platform: Platform, seed: int) -> None:
    """A batch larger than every captured size runs eagerly where the fallback allows it, and the reason names both
    numbers."""
    made = rig(platform, make_config(decode="auto", capture_sizes=(1, 3), fallback="eager"), "paged")
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [4])
    drafts = made.propose(batch)
    assert not drafts.dispatch.captured
    reason = drafts.dispatch.reason
    assert re.search(r"\b3\b.*\b4\b", reason), f"the reason names other sizes than 3 and 4: {reason}"
    eager = rig(platform, make_config(capture_sizes=(1, 3), fallback="eager"), "paged")
    expect_equal(drafts.token_ids, eager.propose(batch).token_ids, "the drafts")


def _longer(tensor: Tensor, dim: int) -> Tensor:
    return tensor.repeat_interleave(2, dim)


WRONG_TENSORS: dict[str, Callable[[HostBatch], HostBatch]] = {
    "sampled_token_ids-short": lambda b: replace(b, sampled_token_ids=b.sampled_token_ids[:-1]),
    "sampled_token_ids-long": lambda b: replace(b, sampled_token_ids=_longer(b.sampled_token_ids, 0)),
    "start_positions-short": lambda b: replace(b, start_positions=b.start_positions[:-1]),
    "start_positions-long": lambda b: replace(b, start_positions=[*b.start_positions, 3]),
    "aux_hidden-short": lambda b: replace(b, aux_hidden=b.aux_hidden[:-1]),
    "aux_hidden-long": lambda b: replace(b, aux_hidden=_longer(b.aux_hidden, 0)),
    "aux_hidden-wide": lambda b: replace(b, aux_hidden=_longer(b.aux_hidden, 1)),
    "block_table-short": lambda b: replace(b, blocks=b.blocks[:-1]),
    "block_table-wide": lambda b: replace(b, blocks=[row + [0] * 30 for row in b.blocks]),
    "sampled_token_ids-narrow": lambda b: replace(b, sampled_token_ids=b.sampled_token_ids[:, :-1]),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
@pytest.mark.hazard("wrong-round-taken")
def test_wrong_tensors_refused(platform: Platform, wrong: str, seed: int) -> None:
    """A round with one tensor too small or too large is refused by its name; the next round is right."""
    made = rig(platform, make_config(), "paged")
    first, second = make_batches(made.config, made.head.aux_size, seed, [3, 3])
    made.propose(first)
    bad = WRONG_TENSORS[wrong](second)
    given = replace(
        bad.on(platform.device, made.head.dtype), num_sampled=second.on(platform.device, made.head.dtype).num_sampled
    )
    host: dict[str, Any] = {"host_start_positions": second.start_positions, "host_num_sampled": second.num_sampled}
    name, _, how = wrong.partition("-")
    said = "rows per request" if how == "narrow" else name
    expect_refusal(lambda: made.drafter.propose(given, **host), f"a round whose {name} is too {how}", said)
    after = made.propose_to_host(second)
    fresh = rig(platform, make_config(), "paged")
    fresh.propose(first)
    expect_equal(after.token_ids, fresh.propose_to_host(second).token_ids, "the drafts of the next round")


WRONG_CACHES: dict[str, Callable[[list[KVCache]], list[KVCache]]] = {
    "fewer-layers": lambda caches: caches[:-1],
    "more-layers": lambda caches: [*caches, caches[0]],
    "fewer-heads": lambda caches: [KVCache(c.key[:, :, :1], c.value[:, :, :1]) for c in caches],
    "more-heads": lambda caches: [KVCache(_longer(c.key, 2), _longer(c.value, 2)) for c in caches],
    "smaller-blocks": lambda caches: [KVCache(c.key[:, :8], c.value[:, :8]) for c in caches],
    "larger-blocks": lambda caches: [KVCache(_longer(c.key, 1), _longer(c.value, 1)) for c in caches],
    "values-of-another-width": lambda caches: [KVCache(c.key, c.value[..., :-8]) for c in caches],
}


@pytest.mark.parametrize("wrong", WRONG_CACHES)
@pytest.mark.hazard("wrong-round-taken")
def test_wrong_caches_refused(platform: Platform, wrong: str, seed: int) -> None:
    """KV caches of another number, block size, number of heads or head size than the head's are a ConfigError."""
    config, head = make_config(), make_head("mtp-modules", 1, platform.device)
    caches = WRONG_CACHES[wrong](random_caches(head, config, platform.device, seed))
    expect_refusal(
        lambda: Drafter(head, caches, platform, config), f"KV caches with {wrong.replace('-', ' ')}", "cache"
    )


@pytest.mark.hazard("context-of-the-drafter")
def test_shorter_context_refused(platform: Platform) -> None:
    """A drafter that was loaded for fewer positions than max_model_len is refused: the error names both numbers."""
    head = make_head("eagle", 1, platform.device)
    config = make_config(max_model_len=MAX_POSITIONS + 1)
    caches = random_caches(head, config, platform.device, 0)
    what = f"a drafter of {MAX_POSITIONS} positions for texts of {MAX_POSITIONS + 1}"
    expect_refusal(lambda: Drafter(head, caches, platform, config), what, rf"{MAX_POSITIONS + 1}.*{MAX_POSITIONS}")


@pytest.mark.hazard("wrong-round-taken")
def test_wrong_prompt_passes_refused(platform: Platform, seed: int) -> None:
    """A prompt pass of more rows than the largest size, or of none, is a CapacityError that names the largest size;
    nothing is written."""
    made = rig(platform, make_config(prefill_sizes=(8, 16)), "paged")
    before = made.host_caches()
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [1])
    for rows in (0, 17):
        aux = batch.aux_hidden[:1].expand(rows, -1).to(platform.device, made.head.dtype)
        expect_refusal(
            lambda rows=rows, aux=aux: made.drafter.prefill([1] * 40, range(rows), batch.blocks[0], aux),
            f"a prompt pass of {rows} rows, where the largest has 16,",
            rf"\b{rows} rows.*\b16\b",
        )
    for seen, kept in zip(made.host_caches(), before, strict=True):
        expect_equal(seen[0], kept[0], "keys after refused passes")
