"""What the device is compared with: attention and a whole chain of drafts, dense, in float64, on the host.

Independent of kernels, buffers, padding, block arithmetic and lowerings: requests one at a time, keys in lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from specgraph.attention import AttentionLayer
from specgraph.models.protocol import DraftHead
from torch import Tensor


def rotate(x: Tensor, rotary: Tensor | None, positions: Tensor) -> Tensor:
    """Rotary embedding as complex products: pair (i, i + half) turns by the angle of its position.

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


def attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool = True) -> Tensor:
    """One request, float64: query [q, heads, dim]; keys, values [n, kv_heads, dim], n >= q -> [q, heads, dim]."""
    rows, heads, _ = query.shape
    length, kv_heads, _ = keys.shape
    keys = keys.repeat_interleave(heads // kv_heads, dim=1)
    values = values.repeat_interleave(heads // kv_heads, dim=1)
    out = torch.empty_like(query)
    for row in range(rows):
        seen = length - rows + 1 + row if causal else length
        scores = torch.einsum("hd,nhd->hn", query[row], keys[:seen]) * scale
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(dim=-1), values[:seen])
    return out


def gather_request(cache: Tensor, blocks: Sequence[int], length: int) -> Tensor:
    """The first `length` entries of a request, [length, kv_heads, dim], from a paged cache on the host."""
    size = cache.shape[1]
    rows = [cache[blocks[position // size], position % size] for position in range(length)]
    return torch.stack(rows) if rows else cache.new_zeros(0, *cache.shape[2:])


class DenseKeys:
    """`attend` for one request: keeps its keys and values as lists, in float64."""

    def __init__(self, layers: Sequence[AttentionLayer], keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.layers = layers
        self.keys = [k.double() for k in keys]
        self.values = [v.double() for v in values]
        self.positions = torch.zeros(0, dtype=torch.int64)

    def at(self, positions: Sequence[int]) -> None:
        """The positions of the next pass's rows; what was there or after it is forgotten."""
        self.positions = torch.tensor(positions, dtype=torch.int64)

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `specgraph.attention.Attend`."""
        layer, start = self.layers[index], int(self.positions[0])
        self.keys[index] = torch.cat([self.keys[index][:start], rotate(key, layer.rotary, self.positions)])
        self.values[index] = torch.cat([self.values[index][:start], value])
        query = rotate(query, layer.rotary, self.positions)
        return attention(query, self.keys[index], self.values[index], layer.scale, layer.causal)


@dataclass(frozen=True, slots=True)
class ChainDraft:
    """One request's drafts by the oracle."""

    token_ids: list[int]
    logits: Tensor
    """float64 [K, draft_vocab]"""
    keys: list[Tensor]
    """Per layer, the keys up to the last draft step, [n, kv_heads, dim]."""
    values: list[Tensor]


def chain_draft(
    head: DraftHead,
    token_ids: Sequence[int],
    aux_hidden: Tensor,
    start: int,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    steps: int,
    forced: Sequence[int] | None = None,
) -> ChainDraft:
    """Draft `steps` tokens for one request.

    Args:
        head: in float64, on the host.
        token_ids: the accepted tokens and the target's own, one a row.
        aux_hidden: [rows, aux_size], the target's hidden states of these rows.
        start: position of the first row.
        keys, values: per layer, what stands before `start`.
        forced: the tokens to go on with, instead of the most likely ones.
    """
    dense = DenseKeys(head.attention_layers, keys, values)
    dense.at(range(start, start + len(token_ids)))
    out = head.forward(torch.tensor(list(token_ids)), head.combine(aux_hidden.double()), dense.attend)
    hidden, carry = out.hidden[-1:], out.carry[-1:]
    drafted: list[int] = []
    logits = []
    for step in range(steps):
        if step:
            dense.at([start + len(token_ids) - 1 + step])
            out = head.forward(torch.tensor([drafted[-1]]), carry, dense.attend)
            hidden, carry = out.hidden, out.carry
        logits.append(head.logits(hidden)[0])
        token = int(logits[-1].argmax())
        if head.draft_to_target is not None:
            token += int(head.draft_to_target[token])
        drafted.append(token if forced is None else forced[step])
    return ChainDraft(drafted, torch.stack(logits), dense.keys, dense.values)
