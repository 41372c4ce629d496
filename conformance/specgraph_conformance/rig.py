"""Helpers of all groups: comparing tensors, capturing a function, choosing attention by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from specgraph.attention import (
    NULL_BLOCK,
    NULL_SLOT,
    AttentionBackend,
    AttentionLayer,
    PagedAttention,
    PagedHostAttention,
)
from specgraph.capture import Body, Recording
from specgraph.device import Graph, GraphPool, Platform
from specgraph.errors import SpecgraphError
from torch import Tensor

from specgraph_conformance.case import Absent

T = TypeVar("T")

LONG_SIZE, LONG_ADDITIONS = 1 << 19, 200
"""Float32 values of `long_work`'s tensor, 2 MiB, and how often it writes them."""


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, also where device memory is host memory."""
    return tensor.detach().to("cpu", copy=True)


def expect_equal(seen: Tensor, wanted: Tensor, what: str = "the result") -> None:
    """Bit equality, with a message that fits a report.

    Raises:
        AssertionError: they differ; says where first, in how many places and by how much.
    """
    assert seen.shape == wanted.shape, f"{what} is {list(seen.shape)}, expected {list(wanted.shape)}"
    if torch.equal(seen, wanted):
        return
    differ = seen != wanted
    first = differ.nonzero()[0].tolist()
    a, b = seen[tuple(first)].item(), wanted[tuple(first)].item()
    raise AssertionError(
        f"{what}: {int(differ.sum())} of {differ.numel()} values differ, the first at {first}: {a} instead of {b}"
    )


def expect_close(seen: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Equality within `tolerance`, absolute plus relative.

    Args:
        seen: any floating dtype, on the host.
        wanted: float64.

    Raises:
        AssertionError: they differ by more, or one has a NaN; says where most and by how much.
    """
    assert seen.shape == wanted.shape, f"{what} is {list(seen.shape)}, expected {list(wanted.shape)}"
    seen = seen.double()
    excess = (seen - wanted).abs() - tolerance * (1 + wanted.abs())
    excess = torch.where(seen.isnan() | wanted.isnan(), torch.inf, excess)
    if excess.numel() == 0 or not (excess > 0).any():
        return
    worst = tuple((excess == excess.max()).nonzero()[0].tolist())
    a, b = seen[worst].item(), wanted[worst].item()
    raise AssertionError(
        f"{what}: {int((excess > 0).sum())} of {excess.numel()} values are off by more than the dtype's rounding "
        f"({tolerance:g}), most at {list(worst)}: {a:.5g} instead of {b:.5g}"
    )


def captured(
    platform: Platform,
    body: Callable[[], Any],
    pool: GraphPool | None = None,
    warm_up: bool = True,
) -> Graph:
    """A graph of `body`, which ran once before on the capture stream to warm up; the device is idle around it."""
    platform.synchronize()
    if warm_up:
        with platform.use(platform.capture_stream):
            body()
        platform.synchronize()
    graph = platform.graph(pool)
    with graph.capture():
        body()
    platform.synchronize()
    return graph


def replay_and_wait(platform: Platform, graph: Graph) -> None:
    """Replay a graph, and wait until the device is idle."""
    graph.replay()
    platform.synchronize()


def assert_usable(platform: Platform) -> None:
    """Assert that eager work and a new capture both work."""
    assert not platform.is_capturing(), "the stream is still capturing after the capture has failed"
    x = torch.ones(8, device=platform.device)
    assert on_host(x + 1).tolist() == [2.0] * 8
    graph = captured(platform, lambda: x.mul_(3))
    before = on_host(x)
    replay_and_wait(platform, graph)
    expect_equal(on_host(x), before * 3)
    graph.close()


def in_another_thread(work: Callable[[], T]) -> T:
    """Return the result of `work` in a thread of its own, which has ended; an error of it is raised here."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def long_work(x: Tensor) -> None:
    """Add 1 to `x` LONG_ADDITIONS times: with LONG_SIZE values the host has issued what must wait before this ends."""
    for _ in range(LONG_ADDITIONS):
        x.add_(1)


def with_numbers(x: Tensor, count: int) -> None:
    """Issue 2 * count ops in place, each of which needs the one before it, with the numbers 0 to 15 in turns."""
    for i in range(count):
        x.mul_(3).add_(i % 16)


def adding(x: Tensor, value: Tensor | float) -> Body:
    """A body for `GraphRunner.capture` that adds to `x` in place."""

    def body(recording: Recording | None) -> None:
        x.add_(value)

    return body


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A shape that attention may refuse: the dtype of its rows and caches, the head size, and tokens per KV block."""

    dtype: torch.dtype = torch.float32
    dim: int = 64
    block: int = 16


def supported_shape(backend: AttentionBackend, heads: tuple[int, int], wanted: AttentionShape) -> AttentionShape:
    """`wanted`, or bfloat16, 128 and 128 in place of what is a default of it and the backend refuses.

    Raises:
        Absent: the backend supports none of these, and says why.
    """
    supports = getattr(backend, "supports", None)
    if supports is None:
        return wanted
    usual = AttentionShape()
    dtypes = (wanted.dtype, torch.bfloat16) if wanted.dtype == usual.dtype else (wanted.dtype,)
    dims = (wanted.dim, 128) if wanted.dim == usual.dim else (wanted.dim,)
    blocks = (wanted.block, 128) if wanted.block == usual.block else (wanted.block,)
    refused = ""
    for dtype, dim, block in product(dtypes, dims, blocks):
        answer = supports(AttentionLayer(*heads, dim, dim**-0.5), dtype, block)
        if answer:
            return AttentionShape(dtype, dim, block)
        refused = refused or answer.reason
    raise Absent(f"attention '{backend.name}': {refused}")


def attention_backend(platform: Platform, name: str) -> AttentionBackend:
    """The core's attention or one of the device's own, by name."""
    if name == "paged":
        return PagedAttention()
    if name == "paged-host":
        own = [factory(platform) for factory in platform.attention_backends().values()]
        if any(backend.host_parameters for backend in own):
            # The core's is plain torch on a device without an op for it: many tasks, and how many depends on lengths.
            raise Absent("the device has attention with host parameters of its own")
        return PagedHostAttention(platform)
    return platform.attention_backends()[name](platform)


def slot_of(position: int, blocks: list[int], limit: int, block: int) -> int:
    """The KV slot of a position by host arithmetic; NULL_SLOT from `limit` on and in the null block."""
    if not 0 <= position < limit or blocks[position // block] == NULL_BLOCK:
        return NULL_SLOT
    return blocks[position // block] * block + position % block


def expect_refusal(
    call: Callable[[], object], what: str, said: str, errors: tuple[type[Exception], ...] = (SpecgraphError,)
) -> None:
    """Expect one of `errors`, with a message that the regular expression `said` is found in.

    Args:
        what: what the call asks for, for the message.

    Raises:
        AssertionError: it was taken, or the message says something else.
    """
    try:
        call()
    except errors as error:
        message = str(error)
    else:
        raise AssertionError(f"{what} was taken without an error")
    assert re.search(said, message), f"{what} is refused by '{message}', in which {said} was not found"
