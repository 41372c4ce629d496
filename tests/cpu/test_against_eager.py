"""A replay computes the bits that eager computes; a capture computes nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

GRAD_MODES = [torch.no_grad, torch.inference_mode]


def test_more_threads_give_the_bits_of_eager_at_as_many_threads(platform):
    threads = torch.get_num_threads()
    x, w = torch.randn(64, 512), torch.randn(512, 512)
    try:
        torch.set_num_threads(2)
        graph = platform.graph()
        with graph.capture():
            y = (x @ w).softmax(-1).sum(0)
        graph.replay()
        assert torch.equal(y, (x @ w).softmax(-1).sum(0))
    finally:
        torch.set_num_threads(threads)


PROGRAMS = {
    "views": lambda x, y, i: (x.t()[1:].t() + y[:, 1:]).unsqueeze(0).expand(2, -1, -1).permute(2, 0, 1).contiguous(),
    "in place on a view": lambda x, y, i: x[:, ::2].mul_(2).add_(y[:, ::2]),
    "assignment": lambda x, y, i: x.__setitem__((slice(0, 2), slice(1, 3)), y[:2, 1:3]),
    "assign a number": lambda x, y, i: x.__setitem__((0, slice(None)), 3.5),
    "masked assignment of a number": lambda x, y, i: x.__setitem__(x > 0, -1.0),
    "index_put": lambda x, y, i: x.index_put_((i,), y[i], accumulate=True),
    "out": lambda x, y, i: torch.add(x, y, alpha=2, out=torch.empty(4, 6)),
    "out into an input": lambda x, y, i: torch.mul(x, 3, out=y),
    "several results": lambda x, y, i: x.topk(2, dim=1)[0] + y.sort(dim=1)[0][:, :2] + x.max(dim=1)[0][:, None],
    "layer norm": lambda x, y, i: F.layer_norm(x, (6,)) * F.rms_norm(y, (6,)),
    "linear and bias": lambda x, y, i: F.gelu(F.linear(x, y, x[:, 0])),
    "losses": lambda x, y, i: F.mse_loss(x, y) + F.huber_loss(x, y, reduction="sum") + F.cross_entropy(x, i),
    "matmul": lambda x, y, i: x @ y.t() + torch.einsum("ij,kj->ik", x, y),
    "dtypes": lambda x, y, i: (x.to(torch.bfloat16) * y.to(torch.bfloat16)).float() + y.to(torch.int32),
    "factories": lambda x, y, i: torch.arange(6.0) + torch.ones(4, 6) * torch.full((6,), 0.5) - torch.zeros_like(x),
    "empty then filled": lambda x, y, i: torch.empty(4, 6).fill_(2) + torch.empty_like(x).copy_(y),
    "joined": lambda x, y, i: torch.cat([x.t(), y.t().double()], -1) + torch.cat([y.t(), x.t()], -1).mean(0, True),
    "orders of dimensions": lambda x, y, i: (
        torch.stack([x.t() * y.t()[:, :1], x.t().cumsum(1)], 1).permute(1, 0, 2) - (y.t() // x.half()[0, :4])
    ),
    "mean of 16 bits": lambda x, y, i: x.bfloat16().mean(-1, keepdim=True, dtype=torch.float32) * y.half().mean([0]),
    "broadcast": lambda x, y, i: (
        (x[:, :1] * y[:1]).div_(i[:, None] + 2) - torch.where(x > 0, y, 0.5).masked_fill(x < 0, 1)
    ),
    "number types": lambda x, y, i: (i // 2) * 3 + i % 2 + (i > 1) * 2.5 + 2**i,
    "embedding": lambda x, y, i: F.embedding(i, x) + F.embedding(i.view(2, 2), y).sum(0)[0],
    "host scalar": lambda x, y, i: x * torch.tensor(3.0),
    "metadata in place": lambda x, y, i: x.clone().t_().unsqueeze_(0) * 2,
    "attention": lambda x, y, i: F.scaled_dot_product_attention(
        x.view(1, 2, 2, 6), y.view(1, 2, 2, 6), x.view(1, 2, 2, 6), is_causal=True
    ),
    "split into empties": lambda x, y, i: torch.cat([x[:0], y, x[:, :0].sum(1, keepdim=True).expand(4, 6)]),
}


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(platform, name, grad_mode):
    torch.manual_seed(0)
    program = PROGRAMS[name]
    live = [torch.randn(4, 6), torch.randn(4, 6), torch.tensor([3, 0, 2, 1])]
    eager = [t.clone() for t in live]
    graph = platform.graph()
    with grad_mode():
        with graph.capture():
            result = program(*live)
        for _ in range(3):
            graph.replay()
            expected = program(*eager)
            assert all(map(torch.equal, live, eager))
            if expected is not None:
                assert result.dtype == expected.dtype
                assert result.stride() == expected.stride()
                assert torch.equal(result, expected)


def test_python_values_are_baked_and_tensors_are_read(platform):
    x, factor, number = torch.ones(3), torch.tensor(2.0), [4.0]
    graph = platform.graph()
    with graph.capture():
        y = x * factor + number[0]
    number[0] = 100.0
    factor.fill_(5.0)
    graph.replay()
    assert y.tolist() == [9.0, 9.0, 9.0]


def test_a_list_argument_is_baked_as_it_was(platform):
    x, shape = torch.arange(6.0), [2, 3]
    graph = platform.graph()
    with graph.capture():
        y = torch.ops.aten.repeat(x.view(shape), shape)
    shape[0] = 7
    graph.replay()
    assert torch.equal(y, x.view(2, 3).repeat(2, 3))


def test_random_numbers(platform):
    """A capture leaves the generator alone; a replay draws what eager draws after the same seed."""
    x = torch.zeros(4, 40)

    def body():
        noise = torch.rand(4, 40) + torch.randn_like(x) + torch.empty(4, 40).exponential_()
        return F.dropout(noise, 0.5), x.uniform_(1, 2), torch.multinomial(x, 3), torch.bernoulli(x - 1)

    graph = platform.graph()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with graph.capture():
        got = body()
    assert torch.equal(before, torch.get_rng_state())
    for seed in (3, 4):
        torch.manual_seed(seed)
        graph.replay()
        graph.replay()
        after, result = torch.get_rng_state(), [t.clone() for t in got]
        torch.manual_seed(seed)
        body()
        assert all(map(torch.equal, result, body()))
        assert torch.equal(after, torch.get_rng_state())


def test_inputs_made_under_inference_mode(platform):
    with torch.inference_mode():
        x = torch.ones(3)
    y = torch.zeros(3)
    graph = platform.graph()
    with torch.inference_mode(), graph.capture():
        x.add_(1)
        y.copy_(x)
    graph.replay()
    graph.replay()
    assert y.tolist() == [3.0, 3.0, 3.0]


def test_parameters(platform):
    linear = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4)
    graph = platform.graph()
    with torch.no_grad(), graph.capture():
        y = linear(x)
    graph.replay()
    with torch.no_grad():
        assert torch.equal(y, linear(x))
    assert not y.requires_grad


def test_modes_do_not_see_a_replay(platform):
    """A replay is one launch: neither dispatch modes nor function modes look inside."""
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(4, 4)
    graph = platform.graph()
    with graph.capture():
        y = x @ x
    with FlopCounterMode(display=False) as flops, torch.device("meta"):
        graph.replay()
    assert flops.get_total_flops() == 0
    assert torch.equal(y, x @ x)
