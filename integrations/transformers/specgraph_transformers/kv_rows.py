"""Taking rejected tokens back out of a transformers cache, where requests of a batch accept different counts.

`Cache.crop` removes the same number of columns from all requests. So requests that accepted fewer tokens are moved to
the right here, up to the last accepted column of the batch: they get more padding on the left, as a shorter prompt has.
A copy of the cache per round is the price, as of each of its updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DummyLayer, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from specgraph.errors import UnsupportedError

MOVABLE = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
"""Kinds of cache layers whose requests can be moved one by one; of a DummyLayer there is nothing to move."""
CROPPABLE = (*MOVABLE, DynamicIndexedLayer)
"""Kinds of cache layers whose last columns can be removed."""


def check_cache(cache: Any, num_requests: int) -> None:
    """Refuse caches that tokens cannot be taken back from.

    Raises:
        UnsupportedError: names the kind of layer.
    """
    if type(cache).__name__ != "DynamicCache" or cache.offloading:
        kind = "an offloaded cache" if getattr(cache, "offloading", False) else type(cache).__name__
        raise UnsupportedError(f"{kind}: speculative decoding takes rejected tokens back out of a plain DynamicCache")
    wanted = CROPPABLE if num_requests == 1 else MOVABLE
    for layer in cache.layers:
        if type(layer) not in wanted:
            one = "; with one request per call it can" if type(layer) in CROPPABLE else ""
            raise UnsupportedError(f"{type(layer).__name__} of the cache cannot take rejected tokens back{one}")


def keep_rows(cache: Any, lengths: Sequence[int], kept: Sequence[int], columns: int, query_len: int) -> int:
    """Keep the first `kept[i]` of the last `query_len` columns of request i.

    Args:
        cache: checked by `check_cache`; the last pass wrote `query_len` columns.
        lengths: tokens of each request before that pass; request i is padded by columns - lengths[i].
        columns: columns before that pass.

    Returns:
        The columns that the cache has now. Request i ends at the last one.
    """
    if len(set(kept)) == 1:
        cache.crop(kept[0] - query_len)
        return columns + kept[0]
    after = max(length + rows for length, rows in zip(lengths, kept, strict=True))
    ends = [columns + rows for rows in kept]
    for layer in cache.layers:
        if layer.keys is not None:
            _move(layer, ends, columns + query_len, after)
    return after


def _move(layer: Any, ends: Sequence[int], columns: int, after: int) -> None:
    """Let a layer's column `ends[i]` of request i follow its new last one.

    Args:
        columns: those that the layer has seen; it holds the last of them.
        after: columns that it has seen from now on.
    """
    stored = after
    if isinstance(layer, DynamicSlidingWindowLayer):
        stored, layer.cumulative_length = min(after, layer.sliding_window - 1), after
    keys, values = layer.keys, layer.values
    assert keys is not None
    assert values is not None
    back = torch.arange(-stored, 0, device=keys.device)
    first = columns - keys.shape[-2]
    # padding comes from any column: it is masked
    source = (torch.tensor(ends, device=back.device)[:, None] + back - first).clamp(min=0)
    layer.keys, layer.values = _taken(keys, source), _taken(values, source)


def _taken(tensor: Tensor, source: Tensor) -> Tensor:
    """The columns `source[i]` of request i: [n, heads, columns, dim], int64 [n, stored] -> [n, heads, stored, dim].

    Whole rows of `dim` elements are copied by one index, many times faster than `take_along_dim` with one per element.
    """
    n, heads, columns, dim = tensor.shape
    starts = torch.arange(n * heads, device=tensor.device).view(n, heads, 1) * columns
    rows = (starts + source[:, None, :]).flatten()
    return tensor.reshape(-1, dim).index_select(0, rows).view(n, heads, source.shape[1], dim)
