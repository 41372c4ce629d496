"""The core's Triton kernels on this device: arguments with packed rows, and the trial that admits them."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from specgraph.errors import first_line
from torch import Tensor

if TYPE_CHECKING:
    from specgraph.kernels.triton.launch import LaunchOptions

    from specgraph_musa.platform import MusaPlatform


def why_absent(platform: MusaPlatform) -> str | None:
    """Why Triton can't compile for the platform's tensors, or None. Runs no kernel. Asks for Triton's target: the
    driver package of the vendor's Triton has had several names (mtgpu, musa, mthreads)."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: install Moore Threads' build of it"
    try:
        from triton.runtime import driver

        target = driver.active.get_current_target().backend
    except Exception as error:
        return f"triton is installed and finds no device: {first_line(error)}"
    if target != platform.device.type:
        return f"this triton compiles for '{target}', and the tensors are on '{platform.device.type}'"
    return None


def launch_options(platform: MusaPlatform) -> LaunchOptions:
    """Default tiles: nothing was tuned, since no MUSA device was at hand."""
    from specgraph.kernels.triton.launch import LaunchOptions

    return LaunchOptions(compute_units=int(platform.musa.get_device_properties(platform.index).multi_processor_count))


def register_ops(platform: MusaPlatform) -> None:
    """Register the kernels under the dispatch key of the platform's tensors. Later calls change nothing."""
    from specgraph.kernels.library import dispatch_key_of
    from specgraph.kernels.triton.implement import register

    register(dispatch_key_of(platform.device), launch_options(platform), around=with_canonical_arguments)


def agree_with_reference(platform: MusaPlatform) -> str | None:
    """Compare paged attention over scattered blocks, and a greedy pick, with plain torch; what is wrong, or None."""
    if (absent := why_absent(platform)) is not None:
        return absent
    from specgraph import kernels
    from specgraph.kernels.triton.implement import TritonOps

    ops, device = TritonOps(launch_options(platform)), platform.device
    g = torch.Generator().manual_seed(0)
    query = torch.randn(4, 4, 32, generator=g).to(device)
    caches = [torch.randn(6, 4, 2, 32, generator=g).to(device) for _ in range(2)]
    table, lens, starts = ([5, 2, 0], [1, 3, 4]), (7, 9), (0, 2, 4)
    args = (query, *caches, *(torch.tensor(t, dtype=torch.int32, device=device) for t in (table, lens, starts)))
    got = ops.paged_attention(*args, query_len=2, scale=32**-0.5)
    wanted = kernels.paged_attention.reference(*args, query_len=2, scale=32**-0.5)
    if not torch.allclose(got, wanted, atol=2e-2, rtol=2e-2):
        return "paged attention in Triton differs from plain torch"
    logits = torch.randn(3, 500, generator=g).to(device)
    step, tokens, drafts = (torch.zeros(s, dtype=torch.int64, device=device) for s in ((1,), (3,), (3, 2)))
    ops.draft_greedy(logits, None, step, tokens, drafts)
    return None if torch.equal(tokens, logits.argmax(1)) else "the greedy pick in Triton differs from argmax"


def with_canonical_arguments(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, the implementation of the op `name`, called with arguments whose rows are packed."""
    schema = getattr(torch.ops.specgraph, name).default._schema

    @functools.wraps(function)
    def implementation(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = canonical_arguments(schema, args, kwargs)
        return function(*args, **kwargs)

    return implementation


def canonical(tensor: Tensor) -> Tensor:
    """`tensor` if each row (all dimensions but the first) is contiguous, else a contiguous copy."""
    return tensor if (tensor[:1] if tensor.dim() > 1 else tensor).is_contiguous() else tensor.contiguous()


def canonical_arguments(
    schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one op call, each tensor with contiguous rows. Raises ValueError where an argument that the op
    writes has other strides: a copy would lose what is written."""
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    for name, value in named.items():
        packed = canonical(value) if isinstance(value, Tensor) else value
        if packed is not value and name in written:
            raise ValueError(
                f"{schema.name} writes '{name}', whose strides are {tuple(value.stride())} for shape "
                f"{list(value.shape)}: its rows must be packed"
            )
        named[name] = packed
    return tuple(named.values())[: len(args)], {name: named[name] for name in kwargs}
