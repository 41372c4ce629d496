"""The oracle of attention: dense, in float64, on the host.

It shares no kernels, buffers, padding, block arithmetic or lowerings with the device. It takes one request at a time
and keeps keys in lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specgraph.attention import AttentionLayer
from specgraph.ops import Mask
from torch import Tensor


def rotate(x: Tensor, rotary: Tensor | None, positions: Tensor) -> Tensor:
    """Apply the rotary embedding with complex products: the pair (i, i + half) turns by the angle of its position.

    Args:
        x: float64 [T, heads, dim].
        rotary: [max_positions, rotary_dim], cosines then sines.
        positions: int64 [T].
    """
    if rotary is None:
        return x
    half = rotary.shape[1] // 2
    turn = torch.complex(rotary[positions, :half].double(), rotary[positions, half:].double())[:, None]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Mask, words: Sequence[int] = ()
) -> Tensor:
    """Return the attention of one request, float64 [q, heads, dim].

    Args:
        query: [q, heads, dim].
        keys, values: [n, kv_heads, dim], n >= q.
        mask: if it has sinks, each is one more score, of a key with value 0.
        words: the words of `mask.ancestors` for these rows.
    """
    rows, heads, _ = query.shape
    length, kv_heads, _ = keys.shape
    place, own = torch.arange(length), torch.arange(rows)[:, None]
    end = length - rows + 1 + own if mask.causal else torch.full_like(own, length)
    seen = place < end
    if mask.window:
        seen &= place >= end - mask.window
    if words:
        begin = length - mask.tree_len
        seen[:, begin:] &= (torch.tensor(words)[:, None] >> torch.arange(mask.tree_len) & 1).bool()
    some = seen.any(0)  # a key that no row sees may be NaN
    keys, values = (part[some].repeat_interleave(heads // kv_heads, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,nhd->hqn", query, keys) * scale
    scores = scores.masked_fill(~seen[:, some], -torch.inf)
    if mask.sinks is not None:
        scores = torch.cat([scores, mask.sinks.double()[:, None, None].expand(heads, rows, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(keys)]
    return torch.einsum("hqn,nhd->qhd", weights, values)


def gather_request(cache: Tensor, blocks: Sequence[int], length: int) -> Tensor:
    """Return a request's first `length` entries of a paged cache on the host, [length, kv_heads, dim]."""
    assert len(blocks) * cache.shape[1] >= length, "the request has too few blocks"
    return torch.cat([cache[:0, 0], *(cache[block] for block in blocks)])[:length]


class DenseKeys:
    """The methods `store` and `attend` for one request. It keeps the keys and values in lists, in float64."""

    def __init__(self, layers: Sequence[AttentionLayer], keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.layers = layers
        self.keys = [k.double() for k in keys]
        self.values = [v.double() for v in values]
        self.positions = torch.zeros(0, dtype=torch.int64)

    @classmethod
    def empty(cls, layers: Sequence[AttentionLayer]) -> DenseKeys:
        """Return the object for a request without keys and values."""
        nothing = [torch.zeros(0, layer.num_kv_heads, layer.head_dim) for layer in layers]
        return cls(layers, nothing, nothing)

    def at(self, positions: Sequence[int]) -> None:
        """Set the positions of the next pass's rows. Keys from the first of these positions on are dropped."""
        self.positions = torch.tensor(positions, dtype=torch.int64)

    def store(self, index: int, key: Tensor, value: Tensor) -> None:
        """See `specgraph.attention.Store`."""
        layer, start = self.layers[index], int(self.positions[0])
        self.keys[index] = torch.cat([self.keys[index][:start], rotate(key, layer.rotary, self.positions)])
        self.values[index] = torch.cat([self.values[index][:start], value])

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `specgraph.attention.Attend`."""
        layer = self.layers[index]
        self.store(index, key, value)
        query = rotate(query, layer.rotary, self.positions)
        return attention(query, self.keys[index], self.values[index], layer.scale, Mask(layer.causal))
