"""Helpers for all groups: comparing tensors, capturing a function, choosing attention by name."""

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
"""The float32 values of the tensor of `long_work` (2 MiB), and the number of times that they are written."""


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, also if device memory is host memory."""
    return tensor.detach().to("cpu", copy=True)


def expect_equal(seen: Tensor, wanted: Tensor, what: str = "the result") -> None:
    """Check that two tensors have the same bits.

    Raises:
        AssertionError: they differ. The message names the first place, the number of places and the largest difference.
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
    """Check that two tensors are equal within `tolerance`, absolute plus relative.

    Args:
        seen: any floating dtype, on the host.
        wanted: float64.

    Raises:
        AssertionError: they differ by more, or one has a NaN. The message names the largest difference and its place.
    """
    assert seen.shape == wanted.shape, f"{what} is {list(seen.shape)}, expected {list(wanted.shape)}"
    seen = seen.double()
    excess = (seen - wanted).abs() - tolerance * (1 + wanted.abs())
    excess = torch.where(seen.isnan() | wanted.isnan(), torch.inf, excess.where(seen != wanted, 0.0))  # inf equals inf
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
    """Capture `body` in a graph. With `warm_up` it runs once before on the capture stream. The device is idle before
    and after."""
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
    """Run `work` in another thread, wait for it, and return its result or raise its error."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def long_work(x: Tensor) -> None:
    """Add 1 to `x` LONG_ADDITIONS times. With LONG_SIZE values it runs long enough for the host to issue work that must
    wait for it."""
    for _ in range(LONG_ADDITIONS):
        x.add_(1)


def with_numbers(x: Tensor, count: int) -> None:
    """Issue 2 * count in-place ops with the numbers 0 to 15 in turns. Each op needs the result of the one before it."""
    for i in range(count):
        x.mul_(3).add_(i % 16)


def adding(x: Tensor, value: Tensor | float) -> Body:
    """Return a body for `GraphRunner.capture` that adds to `x` in place."""

    def body(recording: Recording | None) -> None:
        x.add_(value)

    return body


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A shape that attention may refuse: the dtype of rows and caches, the head size, and the tokens per KV block."""

    dtype: torch.dtype = torch.float32
    dim: int = 64
    block: int = 16


def supported_shape(backend: AttentionBackend, heads: tuple[int, int], wanted: AttentionShape) -> AttentionShape:
    """Return `wanted`, or a shape that the backend supports: bfloat16, 128 and 128 replace refused default values.

    Raises:
        Absent: the backend supports none of these shapes. The message is its reason.
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
    """Return the core's attention or one of the device's own, by name."""
    if name == "paged":
        return PagedAttention()
    if name == "paged-host":
        own = [factory(platform) for factory in platform.attention_backends().values()]
        if any(backend.host_parameters for backend in own):
            # On a device without the op, the core's attention is plain torch: many tasks, in a number that depends on
            # the lengths.
            raise Absent("the device has attention with host parameters of its own")
        return PagedHostAttention(platform)
    return platform.attention_backends()[name](platform)


def slot_of(position: int, blocks: list[int], limit: int, block: int) -> int:
    """Return the KV slot of a position by host arithmetic. NULL_SLOT from position `limit` on, or in the null block."""
    if not 0 <= position < limit or blocks[position // block] == NULL_BLOCK:
        return NULL_SLOT
    return blocks[position // block] * block + position % block


def expect_refusal(
    call: Callable[[], object], what: str, said: str, errors: tuple[type[Exception], ...] = (SpecgraphError,)
) -> None:
    """Check that a call raises one of `errors`, with a message that matches the regular expression `said`.

    Args:
        what: the thing that the call asks for. Failure messages name it.

    Raises:
        AssertionError: the call raised nothing, or its message does not match.
    """
    try:
        call()
    except errors as error:
        message = str(error)
    else:
        raise AssertionError(f"{what} was taken without an error")
    assert re.search(said, message), f"{what} is refused by '{message}', in which {said} was not found"
