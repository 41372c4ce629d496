"""The recorder among other dispatch modes: each of them sees every op once."""

# ruff: noqa: PT012  (a capture or update raises from its body or at its end: both belong in the block)
from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specgraph.errors import HostReadError


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.ops.append(str(func))
        return result


class Refuses(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mul.Tensor:
            raise KeyError("mul")
        return func(*args, **(kwargs or {}))


def body(x):
    return (x.view(-1) * 2).add_(1)


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("outside", [True, False])
def test_a_mode_sees_each_op_once(platform, outside, grad_mode):
    x = torch.ones(2, 3)
    seen, graph = Seen(), platform.graph()
    with grad_mode():
        if outside:
            with seen, graph.capture():
                y = body(x)
        else:
            with graph.capture(), seen:
                y = body(x)
        assert seen.ops == ["aten.view.default", "aten.mul.Tensor", "aten.add_.Tensor"]
        assert graph.num_tasks == 2
        assert y.isnan().all()
        with seen:
            graph.replay()
        assert len(seen.ops) == 3, "a replay is one launch"
    assert y.tolist() == [3.0] * 6


@pytest.mark.parametrize("outside", [True, False])
def test_a_mode_that_raises(platform, outside):
    x = torch.ones(2, 3)
    graph = platform.graph()
    with pytest.raises(KeyError):
        if outside:
            with Refuses(), graph.capture():
                body(x)
        else:
            with graph.capture(), Refuses():
                body(x)
    with graph.capture():
        y = body(x)
    graph.replay()
    assert y.tolist() == [3.0] * 6


def test_modes_stay_after_a_capture_inside_of_them(platform):
    x = torch.ones(2, 3)
    first, second = Seen(), Seen()
    with first, second:
        with platform.graph().capture():
            body(x)
        with pytest.raises(HostReadError), platform.graph().capture():
            x.tolist()
        count = len(second.ops)
        x + 1
    assert len(first.ops) == len(second.ops) == count + 1


def test_warm_up_on_a_side_stream(platform):
    """Capture as a runner does: eager warm-up on a side stream, capture in the same block, replay on the default."""
    x = torch.ones(4)
    stream = platform.stream()
    stream.wait_stream(platform.current_stream())
    graph = platform.graph()
    with platform.use(stream):
        body(x)
        with graph.capture():
            y = body(x)
    platform.current_stream().wait_stream(stream)
    graph.replay()
    assert y.tolist() == [3.0] * 4
