"""Registered torch ops are recorded as one op each, and their implementations run at replay."""

from __future__ import annotations

import pytest
import torch

from specgraph.errors import CaptureError

runs: list[str] = []


@torch.library.custom_op("specgraph_test::scale_into", mutates_args={"out"})
def scale_into(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    runs.append("scale_into")
    out.copy_(x * factor)


@torch.library.custom_op("specgraph_test::outer_sum", mutates_args=())
def outer_sum(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    runs.append("outer_sum")
    return x[:, None] + torch.tensor(lengths)[None, :]


@outer_sum.register_fake
def _(x, lengths):
    return x.new_empty(x.size(0), len(lengths))


@torch.library.custom_op("specgraph_test::swap_and_sum", mutates_args={"tensors"})
def swap_and_sum(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = tensors
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    return first + second, first - second


@swap_and_sum.register_fake
def _(tensors):
    return torch.empty_like(tensors[0]), torch.empty_like(tensors[0])


@torch.library.custom_op("specgraph_test::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.fixture(autouse=True)
def _fresh():
    runs.clear()


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_op_that_writes_its_argument(platform, grad_mode):
    x, out = torch.randn(4), torch.zeros(4)
    graph = platform.graph()
    with grad_mode():
        with graph.capture():
            scale_into(x, out, 2.0)
            y = out + 1
        assert runs == []
        assert graph.num_tasks == 2
        graph.replay()
    assert runs == ["scale_into"]
    assert torch.equal(out, x * 2)
    assert torch.equal(y, x * 2 + 1)


def test_op_with_a_list_of_numbers(platform):
    x, lengths = torch.randn(3), [1, 2, 3, 4]
    graph = platform.graph()
    with graph.capture():
        y = outer_sum(x, lengths)
    lengths[0] = 99
    graph.replay()
    assert torch.equal(y, x[:, None] + torch.tensor([1, 2, 3, 4])[None])


def test_op_with_a_list_of_tensors_and_two_results(platform):
    live = [torch.randn(3), torch.randn(3)]
    eager = [t.clone() for t in live]
    graph = platform.graph()
    with graph.capture():
        result = swap_and_sum(live)
    for _ in range(2):
        graph.replay()
        expected = swap_and_sum(eager)
        assert all(map(torch.equal, result, expected))
        assert all(map(torch.equal, live, eager))


def test_op_without_fake_is_refused_by_name(platform):
    graph = platform.graph()
    with pytest.raises(CaptureError, match=r"without_fake.*register_fake"), graph.capture():
        without_fake(torch.ones(2))
