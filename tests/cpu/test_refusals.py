"""A capture refuses work by name and place; afterwards everything works."""

# ruff: noqa: PT012, SIM117  (a capture or update raises from its body or at its end: both belong in the block)
from __future__ import annotations

import contextlib
import copy
import threading

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from specgraph.errors import CaptureError, HostReadError, SpecgraphError

HOST_READS = {
    "item": (lambda x: x.sum().item(), "_local_scalar_dense"),
    "bool": (lambda x: bool(x.sum()), "_local_scalar_dense"),
    "int": (lambda x: int(x.sum()), "_local_scalar_dense"),
    "float": (lambda x: float(x[0, 0]), "_local_scalar_dense"),
    "if": (lambda x: 1 if x.sum() > 0 else 2, "_local_scalar_dense"),
    "in": (lambda x: 1.0 in x, "_local_scalar_dense"),
    "index by a tensor": (lambda x: x[x[0, 0].long()], "_local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), r"\.tolist"),
    "numpy": (lambda x: x.numpy(), r"\.numpy"),
    "asarray": (np.asarray, "asarray"),
    "cpu": (lambda x: x.cpu(), r"\.cpu"),
    "to cpu": (lambda x: x.to("cpu"), r'\.to\("cpu"\)'),
    "to device=cpu": (lambda x: x.to(device="cpu"), r'\.to\("cpu"\)'),
    "print": (print, "printing"),
    "repr": (repr, "printing"),
    "str": (str, "printing"),
    "format": (lambda x: f"{x}", "printing"),
    "format of a number": (lambda x: f"{x[0, 0]:.3f}", "printing"),
    "deepcopy": (copy.deepcopy, "deepcopy"),
    "boolean mask": (lambda x: x[x > 0], r"index\.Tensor"),
    "write through a mask": (lambda x: x.index_put_((x > 0,), x.flatten()[:2]), r"index_put_.*mask"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "where of one": (lambda x: torch.where(x > 0), "nonzero"),
    "unique": (lambda x: x.unique(), "unique"),
    "equal": (lambda x: torch.equal(x, x + 1), "equal"),
    "allclose": (lambda x: torch.allclose(x, x + 1), "allclose"),
    "tensor_split": (lambda x: x.tensor_split(torch.empty(1).long()), "tensor_split"),
    "repeats on the device": (lambda x: x[0].repeat_interleave(x[0].long()), "repeat_interleave"),
}

OTHERS = {
    "host data": (lambda p, x: torch.tensor([1.0, 2.0]), "host data"),
    "index list": (lambda p, x: x[[0, 1]], "host data"),
    "generator": (lambda p, x: torch.rand(3, generator=torch.Generator()), "generator"),
    "resize": (lambda p, x: x.resize_(99), r"resize_"),
    "resizing out": (lambda p, x: torch.add(x, 1, out=torch.empty(0)), "resizes"),
    "set_": (lambda p, x: x.set_(torch.zeros(1)), r"set_"),
    "sparse": (lambda p, x: x.to_sparse(), "_to_sparse"),
    "synchronize": (lambda p, x: p.synchronize(), "synchronize"),
    "stream synchronize": (lambda p, x: p.current_stream().synchronize(), "synchronize"),
    "event query": (lambda p, x: p.event().query(), "query"),
    "task_update": (lambda p, x: p.task_update(None).__enter__(), "task_update"),
    "too large": (lambda p, x: torch.zeros(1 << 50), "out of memory during capture"),
    "freed input": (lambda p, x: x + torch.from_numpy(np.ones(3, dtype=np.float32)), "host data|freed"),
}


def assert_usable(platform):
    assert not platform.is_capturing()
    assert platform.current_stream().id == 0
    assert _len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    x = torch.ones(3)
    graph = platform.graph()
    with graph.capture():
        y = x + 1
    graph.replay()
    assert y.tolist() == [2.0, 2.0, 2.0]
    platform.synchronize()


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", HOST_READS)
def test_host_read(platform, name, grad_mode):
    read, named = HOST_READS[name]
    x = torch.randn(2, 3)
    graph = platform.graph()
    with grad_mode(), pytest.raises(HostReadError, match=named) as raised, graph.capture():
        x.add_(1)
        read(x)
    assert "test_refusals.py" in str(raised.value) or name == "deepcopy"  # deepcopy is called by the copy module
    with pytest.raises(CaptureError, match="empty: capture it first"):
        graph.replay()
    assert_usable(platform)


@pytest.mark.parametrize("name", OTHERS)
def test_refused(platform, name):
    act, named = OTHERS[name]
    graph = platform.graph()
    with pytest.raises(CaptureError, match=named), graph.capture():
        act(platform, torch.randn(3))
    assert_usable(platform)


def test_to_the_platforms_device_is_no_host_read(platform):
    x = torch.randn(3)
    graph = platform.graph()
    with graph.capture():
        y = x.to(platform.device) + x.to(platform.device, torch.float64)
    graph.replay()
    assert torch.equal(y, x + x.double())


def test_a_swallowed_host_read_still_fails_the_capture(platform):
    x = torch.ones(3)
    graph = platform.graph()
    with pytest.raises(CaptureError, match=r"invalidated.*tolist"), graph.capture():
        with contextlib.suppress(HostReadError):
            x.tolist()
    assert_usable(platform)


def test_an_exception_of_the_body_passes_and_leaves_everything_usable(platform):
    x = torch.ones(3)
    state = torch.get_rng_state()
    graph = platform.graph()
    with pytest.raises(ZeroDivisionError), graph.capture():
        x.add_(torch.rand(3))
        _ = 1 / 0
    assert torch.equal(torch.get_rng_state(), state)
    assert x.tolist() == [1.0, 1.0, 1.0]
    with graph.capture():  # the same graph can try again
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2.0, 2.0, 2.0]
    assert_usable(platform)


def test_an_error_of_the_op_itself_is_torchs_own(platform):
    graph = platform.graph()
    with pytest.raises(RuntimeError) as raised, graph.capture():
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not isinstance(raised.value, SpecgraphError)
    assert_usable(platform)


def in_thread(work):
    caught: list[BaseException] = []

    def run():
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0] if caught else None


def test_another_thread_may_synchronize(platform):
    with platform.graph().capture():
        assert in_thread(platform.synchronize) is None
    assert_usable(platform)


def test_other_threads_run_eagerly_during_a_capture(platform):
    x = torch.ones(3)
    graph = platform.graph()
    with graph.capture():
        assert in_thread(lambda: x.add_(1)) is None
    assert x.tolist() == [2.0] * 3


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="older torch has no frame that tells compiled code apart")
def test_compiled_code_is_refused(platform):
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    x = torch.ones(3)
    compiled(x)
    graph = platform.graph()
    with pytest.raises(CaptureError, match=r"torch\.compile"), graph.capture():
        compiled(x)
    assert_usable(platform)
    assert torch.equal(compiled(x), x.sin() + 1)


def test_an_op_that_fails_at_replay_is_named(platform):
    table, index = torch.ones(3, 2), torch.tensor([0, 2])
    graph = platform.graph()
    with graph.capture():
        y = table.index_select(0, index) + 1
    index.fill_(7)
    with pytest.raises(IndexError) as raised:
        graph.replay()
    if hasattr(raised.value, "__notes__"):
        assert "aten.index_select" in raised.value.__notes__[0]
        assert "test_refusals.py" in raised.value.__notes__[0]
    index.fill_(1)
    graph.replay()
    assert (y == 2).all()
