"""The op of a mixture of experts, in all its ways, against a float64 loop over rows and their experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgraph import ops
from specgraph.device.cpu import CpuPlatform
from specgraph.ops.experts import grouped_expert_mlp

WAYS = {"host": ops.expert_mlp, "reference": ops.expert_mlp.reference, "grouped": grouped_expert_mlp}
HIDDEN, INNER = 16, 8


def loop64(x, ids, weights, gate_up, down, gate_up_bias, down_bias, alpha, limit):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for expert, weight in zip(ids[row].tolist(), weights[row].double(), strict=True):
            both = gate_up[expert].double() @ x[row].double()
            both = both if gate_up_bias is None else both + gate_up_bias[expert].double()
            gate, up = both[:INNER], both[INNER:]
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                inner = gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
            else:
                inner = gate / (1 + torch.exp(-gate)) * up
            result = down[expert].double() @ inner
            out[row] += weight * (result if down_bias is None else result + down_bias[expert].double())
    return out


def make(rows, experts, top_k, biases, seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return (torch.randn(shape, generator=g) / 2).to(dtype)

    ids = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(rows)])
    matrices = random(experts, 2 * INNER, HIDDEN), random(experts, HIDDEN, INNER)
    added = (random(experts, 2 * INNER), random(experts, HIDDEN)) if biases else (None, None)
    return random(rows, HIDDEN), ids, random(rows, top_k).float(), *matrices, *added


@pytest.mark.parametrize("way", ["host", "reference"])
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9), experts=st.integers(1, 7), top_k=st.integers(1, 7), biases=st.booleans(),
    limit=st.sampled_from([0.0, 0.5]), seed=st.integers(0, 99),
)  # fmt: skip
def test_against_float64(way, rows, experts, top_k, biases, limit, seed):
    tensors = make(rows, experts, min(top_k, experts), biases, seed)
    got = WAYS[way](*tensors, 1.7, limit)
    torch.testing.assert_close(got.double(), loop64(*tensors, 1.7, limit), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biases", [False, True])
def test_the_grouped_matmul_in_bfloat16(biases):
    tensors = make(7, 6, 3, biases, seed=4, dtype=torch.bfloat16)
    got = grouped_expert_mlp(*tensors, 1.7, 0.5)
    torch.testing.assert_close(got.double(), loop64(*tensors, 1.7, 0.5), rtol=0.03, atol=0.06)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 7), parts=st.sampled_from([1, 2, 3, 6]), biases=st.booleans(), seed=st.integers(0, 99))
def test_parts_of_the_experts_add_up(way, rows, parts, biases, seed):
    """Each part of 6 experts is given all rows, and adds nothing for the experts of other parts."""
    dtype = torch.bfloat16 if way == "grouped" else torch.float32
    x, ids, weights, *stacked = make(rows, 6, 3, biases, seed, dtype)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for first in range(0, 6, 6 // parts):
        own = [None if t is None else t[first : first + 6 // parts] for t in stacked]
        total += WAYS[way](x, ids, weights, *own, 1.7, 0.5, first).double()
    tolerance = {"rtol": 0.03, "atol": 0.06} if way == "grouped" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(total, loop64(x, ids, weights, *stacked, 1.7, 0.5), **tolerance)


def test_a_replay_follows_the_choice():
    """Captured with all rows at one expert, replayed with each row at others: counts are not baked in."""
    x, ids, *rest = make(4, 5, 2, True, seed=1)
    held = torch.tensor([[0, 1]] * 4)
    graph = CpuPlatform().graph()
    with torch.inference_mode():
        with graph.capture():
            out = ops.expert_mlp(x, held, *rest)
        held.copy_(ids)
        graph.replay()
    torch.testing.assert_close(out.double(), loop64(x, ids, *rest, 1.0, 0.0), rtol=1e-5, atol=1e-5)
