"""Removes rejected tokens from a transformers cache, also if the requests of a batch accept different counts.

`Cache.crop` removes the same number of columns from all requests. So a request that accepted fewer tokens is moved to
the right, up to the last accepted column of the batch. It gets more padding on the left, like a shorter prompt. The
price is one copy of the cache per round, the same as for each update of such a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DummyLayer, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from specgraph.errors import UnsupportedError

MOVABLE = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
"""Kinds of cache layers in which each request can be moved on its own. A DummyLayer has nothing to move."""
CROPPABLE = (*MOVABLE, DynamicIndexedLayer)
"""Kinds of cache layers that `crop` can remove the last columns from."""


def check_cache(cache: Any, num_requests: int) -> None:
    """Check that rejected tokens can be removed from a cache.

    Raises:
        UnsupportedError: they can't. The message names the kind of cache or layer.
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
        cache: a cache that passed `check_cache`. The last pass wrote `query_len` columns.
        lengths: tokens of each request before that pass. The padding of request i is columns - lengths[i].
        columns: columns before that pass.

    Returns:
        The number of columns in the cache now. Every request ends at the last one.
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
    """Move the columns of each request to the right, so that column `ends[i]` - 1 of request i becomes the last one.

    Args:
        columns: the number of columns that the layer has seen. It stores the last of them.
        after: the number of columns that it counts as seen from now on.
    """
    stored = after
    if isinstance(layer, DynamicSlidingWindowLayer):
        stored, layer.cumulative_length = min(after, layer.sliding_window - 1), after
    keys, values = layer.keys, layer.values
    assert keys is not None
    assert values is not None
    back = torch.arange(-stored, 0, device=keys.device)
    first = columns - keys.shape[-2]
    # Padding may be a copy of any column: it is masked.
    source = (torch.tensor(ends, device=back.device)[:, None] + back - first).clamp(min=0)
    layer.keys, layer.values = _taken(keys, source), _taken(values, source)


def _taken(tensor: Tensor, source: Tensor) -> Tensor:
    """Return columns `source[i]` of request i: [n, heads, columns, dim], int64 [n, stored] -> [n, heads, stored, dim].

    One index copies a whole row of `dim` elements. `take_along_dim` has an index per element and is many times slower.
    """
    n, heads, columns, dim = tensor.shape
    starts = torch.arange(n * heads, device=tensor.device).view(n, heads, 1) * columns
    rows = (starts + source[:, None, :]).flatten()
    return tensor.reshape(-1, dim).index_select(0, rows).view(n, heads, source.shape[1], dim)
