"""The choice of attention: by name, or the first of the platform's that supports all layers."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specgraph.attention.interface import AttentionBackend, AttentionFactory, AttentionLayer
from specgraph.attention.paged import PagedAttention, PagedHostAttention
from specgraph.device import Platform, Support
from specgraph.errors import ConfigError, UnsupportedError
from specgraph.validation import Tokens, check, checked


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """An attention backend, and what was decided with it."""

    backend: AttentionBackend
    block_size: int
    """Tokens per KV block: what was asked for, or what the backend prefers."""
    reason: str = ""
    """The reason why `auto` did not take what the platform offers; empty where it did, or where a name was given."""


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
    """Return the attention backend of that name, for the given layers.

    Args:
        name: "device" or "host": the core's paged attention, with lengths from device tensors or from host integers.
            A name that the platform offers (`Platform.attention_backends`). "auto": the first that the platform
            offers and that supports all layers, "device" where there is none.
        layers: the attention layers of all models that it is for. Without layers, shapes are not looked at.
        dtype: of these layers; needed with them.
        block_size: tokens per KV block; None for what the backend prefers, of cells on each rank where ranks share it.
        trees: it must run draft trees (`AttentionBackend.supports_trees`).
        cache_dtype: of the KV caches; `dtype` when None.

    Raises:
        ConfigError: there is no attention of that name on this platform, or layers come without their dtype.
        UnsupportedError: the attention of that name does not support the layers, or a package that it needs is not
            installed.
    """
    own = platform.attention_backends()
    named: Mapping[str, AttentionFactory] = {"device": _paged, "host": PagedHostAttention, **own}
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
    """Return why a backend can't run these layers, or with `trees` their draft trees; empty if it can."""
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
    """Raise UnsupportedError for attention without an ancestor mask for these layers, in blocks of `size` tokens."""
    if refused := unsupported(backend, layers, dtype, size, trees=True):
        raise UnsupportedError(refused)
