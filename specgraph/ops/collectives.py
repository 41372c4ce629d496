"""Collectives as ops, so that a graph records each as one node. `specgraph.parallel` knows a group of ranks by name.

Every rank must issue the same collectives in the same order. On the CPU the hosts compare the label of each collective
before it runs, in the exchange that also carries a small tensor. Ranks that differ then get an error; on devices they
would wait for ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops.library import op
from specgraph.parallel import ALL_GATHER, ranks_named


def _label(what: str, x: Tensor) -> str:
    return f"{what} of {str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


@op(writes=("x",))
def all_reduce(x: Tensor, group: str) -> None:
    """Replace contiguous x by its sum over the ranks named `group`. Every rank gets the same bits."""
    ranks, label = ranks_named(group), _label("all_reduce", x)
    if (parts := ranks.gather_small(label, x)) is not None:
        x.copy_(parts.sum(dim=0))
    else:
        ranks.run(label, "all_reduce", x)


def _gather_fake(x: Tensor, group: str, size: int) -> Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:])


@op(fake=_gather_fake)
def all_gather(x: Tensor, group: str, size: int) -> Tensor:
    """Return the x [N, ...] of all `size` ranks named `group`, joined along the first dimension in rank order."""
    ranks, label = ranks_named(group), _label("all_gather", x)
    if (parts := ranks.gather_small(label, x)) is not None:
        return parts.flatten(0, 1)
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    ranks.run(label, ALL_GATHER, out, x.contiguous())
    return out


def _best_fake(logits: Tensor, first_id: int) -> Tensor:
    return logits.new_empty(logits.shape[0], 2, dtype=torch.int64)


@op(fake=_best_fake)
def best_tokens(logits: Tensor, first_id: int) -> Tensor:
    """Return the most likely token of each row in a rank's part of the vocabulary. Ranks exchange it instead of logits.

    Args:
        logits: [N, part of the vocabulary].
        first_id: the first token of the part.

    Returns:
        int64 [N, 2]: the logit as an integer that sorts like it, and the token's id. The integer is exact for every
        dtype: it has the logit's bits, inverted below the sign bit if the logit is negative.
    """
    value, index = logits.max(dim=-1)
    wide = value.dtype == torch.float64
    bits = (value if wide else value.float()).add(0.0).view(torch.int64 if wide else torch.int32)  # -0 becomes 0
    most = torch.iinfo(bits.dtype).max
    ordered = torch.where(bits < 0, bits ^ most, bits)
    return torch.stack((ordered.long(), index + first_id), dim=1)


def best_of(candidates: Tensor) -> Tensor:
    """Return the ids, int64 [N], of the most likely tokens of all ranks. The first rank wins a tie.

    Args:
        candidates: int64 [ranks, N, 2], the results of `best_tokens`. The first rank has the smallest ids.
    """
    order, ids = candidates.unbind(-1)
    return ids.gather(0, order.argmax(dim=0, keepdim=True))[0]
