"""merged-chain-collectives: why the policy refuses it, shown on a simulated baked barrier."""

from __future__ import annotations

import pytest
import torch
from draft_on import on, rounds_for
from specgraph.decoding import allocate_caches
from specgraph.drafting import DraftConfig, Drafter
from specgraph.errors import UnsupportedError
from specgraph.models.load import load_drafter, load_target

import specgraph_musa.platform
from specgraph_musa.platform import MusaPlatform
from specgraph_musa.policy import Policy
from torch_musa import simulated


class ShardedHead:
    """A head whose output goes through a collective, as under tensor parallelism."""

    def __init__(self, head) -> None:
        self._head = head

    def __getattr__(self, name: str):
        if name == "draft_greedy":  # the fused pick would go past the collective
            raise AttributeError(name)
        return getattr(self._head, name)

    def forward(self, *args, **kwargs):
        out = self._head.forward(*args, **kwargs)
        return out._replace(hidden=simulated.all_reduce(out.hidden, slot="output"))


def draft(pair, platform, lowering, k=4, rounds=3):
    config = DraftConfig(
        num_speculative_tokens=k, max_num_requests=3, max_model_len=64, block_size=4, lowering=lowering
    )  # fmt: skip
    head = ShardedHead(load_drafter(pair[1], load_target(pair[0], device=platform.device, dtype=torch.float32)))
    blocks = 1 + -(-config.max_model_len // config.block_size) * config.max_num_requests
    caches = allocate_caches(head.attention_layers, blocks, config.block_size, torch.float32, platform.device)
    drafter = Drafter(head, caches, platform, config)
    batches = rounds_for(drafter, seed=3)
    with torch.inference_mode():
        drafter.capture()
        tokens = [drafter.propose(on(platform, batches.next())).token_ids.cpu() for _ in range(rounds)]
    drafter.close()
    return tokens


@pytest.fixture
def ranks(monkeypatch):
    """Several ranks, as torch.distributed would report them."""
    monkeypatch.setattr(specgraph_musa.platform, "has_collectives", lambda: True)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_policy_refuses_it_and_step_is_right(pair, ranks):
    platform = MusaPlatform(0, Policy(merged="on"))
    expected = draft(pair, platform, "eager")
    with pytest.raises(UnsupportedError, match="corrupted the state of collectives"):
        draft(pair, platform, "merged")
    assert same(draft(pair, platform, "auto"), expected)
    assert same(draft(pair, platform, "step"), expected)
    assert same(draft(pair, platform, "piecewise"), expected)


def test_forced_on_the_bad_toolchain_it_is_wrong_from_the_second_token_on(pair, ranks):
    platform = MusaPlatform(0, Policy(merged="forced"))
    expected, got = draft(pair, platform, "eager"), draft(pair, platform, "merged")
    assert all(torch.equal(x[:, 0], y[:, 0]) for x, y in zip(got, expected, strict=True))
    assert not same(got, expected)


def test_forced_on_a_good_toolchain_it_is_right(pair, ranks):
    simulated.defects.barrier_baked = False
    platform = MusaPlatform(0, Policy(merged="forced"))
    assert same(draft(pair, platform, "merged"), draft(pair, platform, "eager"))
