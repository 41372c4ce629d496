"""Which Triton ops stand behind the draft ops on this device, and a first look at whether they compute."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from specgraph import kernels
from specgraph.kernels.triton.implement import TritonOps, register
from specgraph.kernels.triton.launch import LaunchOptions

from specgraph_musa.kernels import canonical_arguments

if TYPE_CHECKING:
    from specgraph_musa.platform import MusaPlatform


def launch_options(platform: MusaPlatform) -> LaunchOptions:
    """Nothing tuned: no MUSA device was at hand."""
    return LaunchOptions(compute_units=int(platform.musa.get_device_properties(platform.index).multi_processor_count))


def register_ops(platform: MusaPlatform) -> None:
    """Under the dispatch key of the platform's tensors. Later calls change nothing."""
    key = torch._C._dispatch_key_for_device(platform.device.type)
    register(key, launch_options(platform), around=with_canonical_arguments)


def with_canonical_arguments(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, given arguments whose rows are packed."""
    schema = getattr(torch.ops.specgraph, name).default._schema

    @functools.wraps(function)
    def implementation(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = canonical_arguments(schema, args, kwargs)
        return function(*args, **kwargs)

    return implementation


def agree_with_reference(platform: MusaPlatform) -> str | None:
    """Paged attention over scattered blocks, and a greedy pick, against plain torch; what is wrong, or None."""
    ops, device = TritonOps(launch_options(platform)), platform.device
    g = torch.Generator().manual_seed(0)
    query = torch.randn(4, 4, 32, generator=g).to(device)
    caches = [torch.randn(6, 4, 2, 32, generator=g).to(device) for _ in range(2)]
    table = torch.tensor([[5, 2, 0], [1, 3, 4]], dtype=torch.int32, device=device)
    lens = torch.tensor([7, 9], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    args = (query, caches[0], caches[1], table, lens, starts)
    how = {"query_len": 2, "scale": 32**-0.5}
    wanted = kernels.paged_attention.reference(*args, **how)
    if not torch.allclose(ops.paged_attention(*args, **how), wanted, atol=2e-2, rtol=2e-2):
        return "paged attention differs from the reference"
    logits = torch.randn(3, 500, generator=g).to(device)
    step = torch.zeros(1, dtype=torch.int64, device=device)
    tokens = torch.zeros(3, dtype=torch.int64, device=device)
    drafts = torch.zeros(3, 2, dtype=torch.int64, device=device)
    ops.draft_greedy(logits, None, step, tokens, drafts)
    if not torch.equal(tokens, logits.argmax(1)):
        return "the greedy pick differs from argmax"
    return None
