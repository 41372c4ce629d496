"""Tokens equal those of the `cpu` platform, in every lowering; the runtime underneath is simulated."""

from __future__ import annotations

import pytest
import torch
from draft_on import VOCAB, make_drafter, on, propose, rounds_for
from specgraph.decoding import Request, SpeculativeDecoder
from specgraph.drafting import DraftConfig
from specgraph.errors import UnsupportedError
from specgraph.models.load import load_drafter, load_target

LOWERINGS = ["eager", "piecewise", "step", "merged"]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_chain_drafts_what_cpu_drafts(pair, musa, forced, cpu, lowering, k):
    expected = make_drafter(pair, cpu, "eager", k)
    drafter = make_drafter(pair, forced if lowering == "merged" else musa, lowering, k)
    assert drafter.resolution.lowering == lowering
    rounds = rounds_for(expected, seed=k)
    for number in range(12):
        batch = rounds.next(num_requests=(1, 5, 2, 4, 3)[number] if number < 5 else None)
        assert torch.equal(propose(drafter, batch), propose(expected, batch)), (lowering, k, number)
    launches = {"merged": 1, "step": k, "eager": 0}.get(lowering)
    if launches is not None:
        assert (drafter.runner.launches if drafter.runner else 0) == launches * drafter.num_proposes
    drafter.close()


def test_auto_is_step(pair, musa):
    drafter = make_drafter(pair, musa, "auto", 3)
    assert drafter.resolution.lowering == "step"
    assert "SPECGRAPH_MUSA_MERGED=1" in drafter.resolution.refusals["merged"]
    assert "3.49 %" in drafter.resolution.explain()
    drafter.close()


def test_merged_by_name_is_refused_with_the_reason(pair, musa):
    with pytest.raises(UnsupportedError, match="SPECGRAPH_MUSA_MERGED=1"):
        make_drafter(pair, musa, "merged", 3)


def test_auto_is_merged_once_it_is_allowed(pair, forced):
    drafter = make_drafter(pair, forced, "auto", 3)
    assert drafter.resolution.lowering == "merged"
    drafter.close()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_generation_gives_what_cpu_gives(pair, musa, forced, cpu, lowering):
    g = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in (3, 9, 1, 14)]
    requests = [Request(prompt_token_ids=prompt, max_tokens=24) for prompt in prompts]

    def generate(platform, name):
        target = load_target(pair[0], device=platform.device, dtype=torch.float32)
        config = DraftConfig(
            num_speculative_tokens=3, max_num_requests=3, max_model_len=64, block_size=4, lowering=name
        )  # fmt: skip
        with torch.inference_mode():
            decoder = SpeculativeDecoder(target, load_drafter(pair[1], target), platform, config)
            decoder.capture()
            results = decoder.generate(requests)
            decoder.close()
        return [result.token_ids for result in results], decoder.metrics

    tokens, metrics = generate(forced if lowering == "merged" else musa, lowering)
    expected, expected_metrics = generate(cpu, "eager")
    assert tokens == expected
    assert metrics == expected_metrics


def test_a_stale_input_is_told_before_the_replay(pair, musa):
    """A rebound buffer (the field's commonest silent bug) is no silent one here."""
    from specgraph.errors import StaleInputError

    drafter = make_drafter(pair, musa, "step", 3)
    batch = rounds_for(drafter, seed=1).next()
    moved = drafter.head.weights()
    name = next(iter(moved))
    drafter.read_set = dict
    drafter.runner._reads = lambda: {**type(drafter).read_set(drafter), f"weights.{name}": moved[name].clone()}
    with torch.inference_mode(), pytest.raises(StaleInputError, match="reassigned or moved"):
        drafter.propose(on(musa, batch))
    drafter.close()
