"""The choice of attention: by name, or the first one of the platform that supports all layers."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specgraph.attention.interface import AttentionBackend, AttentionLayer
from specgraph.attention.paged import PagedAttention, PagedHostAttention
from specgraph.device import Platform, Support
from specgraph.errors import ConfigError, UnsupportedError
from specgraph.validation import Tokens, check, checked


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The chosen attention backend and block size."""

    backend: AttentionBackend
    block_size: int
    """Tokens per KV block: the caller's number, or the backend's `preferred_block_size`."""
    reason: str = ""
    """The reasons why `auto` refused attention that the platform offers. Empty if it took the first one, or if the
    caller named an attention."""


@checked
def choose_attention(
    name: str,
    platform: Platform,
    layers: Sequence[AttentionLayer] = (),
    dtype: torch.dtype | None = None,
    block_size: Tokens | None = None,
    trees: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> AttentionChoice:
    """Choose an attention backend that runs the given layers.

    Args:
        name: "device" or "host": the core's paged attention, with lengths from device tensors or from host integers.
            "auto": the first attention of the platform (`Platform.attention_backends`) that supports all layers, or
            "device" if there is none. Any other name is one of the platform's.
        layers: the attention layers of all models that use it. Without layers, no shapes are checked.
        dtype: the dtype of the layers. It is needed if there are any.
        block_size: tokens per KV block. None for the backend's `preferred_block_size`, times the number of ranks that
            share a block.
        trees: it must run draft trees (`AttentionBackend.supports_trees`).
        cache_dtype: the dtype of the KV caches. None for `dtype`.

    Raises:
        ConfigError: the platform has no attention of this name, or layers are given without their dtype.
        UnsupportedError: the named attention does not support the layers, or a package that it needs is not installed.
    """
    own = platform.attention_backends()
    named: Mapping[str, Callable[..., AttentionBackend]] = {"device": _paged, "host": PagedHostAttention, **own}
    if name not in ("auto", *named):
        offered = ", ".join(["auto", *named])
        raise ConfigError(f"no attention {reprlib.repr(name)} on platform '{platform.info.name}'; there are {offered}")
    if layers and dtype is None:
        raise ConfigError("choose_attention: give the dtype of the layers too")
    reasons: list[str] = []
    ranks = max((layer.context_size for layer in layers), default=1)
    for factory in own.values() if name == "auto" else [named[name]]:
        backend = factory(platform)
        size = block_size or backend.preferred_block_size * ranks
        refused = unsupported(backend, layers, dtype, size, trees, cache_dtype)
        if not refused:
            return AttentionChoice(backend, size, "; ".join(reasons))
        reasons.append(refused)
    if name != "auto":
        raise UnsupportedError(reasons[0])
    backend = _paged(platform)
    return AttentionChoice(backend, block_size or backend.preferred_block_size * ranks, "; ".join(reasons))


def _paged(platform: Platform) -> AttentionBackend:
    return PagedAttention()


def unsupported(
    backend: AttentionBackend,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype | None,
    block_size: int,
    trees: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> str:
    """Return why a backend can't run these layers, or with `trees` their draft trees. Empty if it can."""
    if cache_dtype not in (None, dtype, *backend.cache_dtypes):
        return (
            f"attention '{backend.name}': it takes KV caches in the model's dtype only, asked for is {cache_dtype}; "
            "--attention device takes those in FP8"
        )
    for layer in layers:
        assert dtype is not None
        support = check(f"{backend.name}.supports", backend.supports(layer, dtype, block_size), Support)
        if support and trees:
            asked = backend.supports_trees(layer, dtype, block_size)
            support = check(f"{backend.name}.supports_trees", asked, Support)
        if not support:
            return f"attention '{backend.name}': {support.reason}"
    return ""


def check_trees(backend: AttentionBackend, layers: Sequence[AttentionLayer], dtype: torch.dtype, size: int) -> None:
    """Raise UnsupportedError if the attention can't run draft trees in these layers, with blocks of `size` tokens."""
    if refused := unsupported(backend, layers, dtype, size, trees=True):
        raise UnsupportedError(refused)
