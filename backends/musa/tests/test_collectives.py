"""merged-chain-collectives: the policy that refuses collectives in captures, where a device lost their state."""

from __future__ import annotations

import pytest
import torch
from draft.on_platform import batches_for, make_drafter, propose
from draft.pairs import make_head, make_target
from specgraph.errors import UnsupportedError
from specgraph_models.parallel import TensorParallel

from specgraph_musa.platform import MusaPlatform
from specgraph_musa.policy import Policy


class ShardedHead:
    """A head that two ranks run together."""

    pair_input = None
    ranks = TensorParallel(0, 2, "two")

    def __init__(self, head) -> None:
        self._head = head

    def __reduce__(self):
        return ShardedHead, (self._head,)

    def __getattr__(self, name: str):
        return getattr(self._head, name)


def draft(platform, lowering, k=4, rounds=3):
    head = ShardedHead(make_head("eagle3", make_target()))
    drafter = make_drafter(platform, lowering, k, head=head, max_num_requests=3, capture_sizes=[1, 3])
    batches = batches_for(drafter, seed=3)
    tokens = [propose(drafter, batches.next()) for _ in range(rounds)]
    drafter.close()
    return tokens


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_policy_refuses_captured_collectives_and_auto_is_right():
    platform = MusaPlatform(0, Policy(merged="on"))
    expected = draft(platform, "eager")
    for lowering in ("merged", "step", "piecewise"):
        with pytest.raises(UnsupportedError, match="corrupted the state of collectives"):
            draft(platform, lowering)
    assert same(draft(platform, "auto"), expected)


def test_forced_graphs_of_one_step_are_right():
    platform = MusaPlatform(0, Policy(merged="forced"))
    expected = draft(platform, "eager")
    assert same(draft(platform, "step"), expected)
    assert same(draft(platform, "piecewise"), expected)
