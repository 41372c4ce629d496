"""The oracle of linears: parts of them in float64 on the host, and comparisons in which small rows count too."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph_conformance.rig import expect_close, on_host

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""The tolerance of a linear's results, absolute plus relative, by dtype."""
EPS = 0.04
"""The eps of norms: as large as the mean square of the smallest rows of `uneven`, so that another one shows."""


def normal(
    g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    """Return normal values times `scale`, in host memory."""
    return (torch.randn(shape, generator=g) * scale).to(dtype)


def norm_of(g: torch.Generator, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight of a norm, [size] values around 1."""
    return normal(g, (size,), torch.float32, 1 / 8).add(1).to(dtype)


def small_integers(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Return float32 values from -3 to 3: sums of their products are exact in float32, so equal in every order."""
    return torch.randint(-3, 4, shape, generator=g).float()


def head_of_ties(g: torch.Generator, x: Tensor, vocab: int, every: int = 1) -> Tensor:
    """Return the projection [vocab, size] of a head, small integers, whose best token for each row of x, also small
    integers, is there twice: once in each half of the vocabulary. Its logit leads by more than half precision rounds.

    every: 2 leaves the one in the second half alone for every other row.
    """
    half = torch.randint(-1, 2, (vocab // 2, x.shape[1]), generator=g).float()
    tokens = torch.randperm(vocab // 2, generator=g)[: len(x)]
    half[tokens] = x.sign()[: len(tokens)]
    whole = torch.cat((half, half.flip(0)))
    if every > 1:
        whole[tokens[1::every]] = 0
    return whole


def first_of_largest(logits: Tensor) -> Tensor:
    """Return the lowest id among the most likely tokens of each row."""
    ids = torch.arange(logits.shape[-1])
    return ids.where(logits == logits.amax(-1, keepdim=True), logits.shape[-1]).amin(-1)


def uneven(g: torch.Generator, rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return rows [rows, size] of magnitude 0.2, 1 and 5 in turns."""
    magnitude = torch.tensor([0.2, 1.0, 5.0])[torch.arange(rows) % 3]
    return (normal(g, (rows, size)) * magnitude[:, None]).to(dtype)


def normed(x: Tensor, norm: Tensor | None, eps: float = EPS) -> Tensor:
    """Return rms_norm(x) in float64; x itself without a norm."""
    x = x.double()
    return x if norm is None else x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.double()


def gated(packed: Tensor) -> Tensor:
    """Return silu(gate) * up of (gate | up)."""
    gate, up = packed.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def expect_magnitudes(seen: Tensor, wanted: Tensor, what: str) -> None:
    """Check that `seen`, on the device, is within rounding of `wanted`, relative to the largest value of each magnitude
    of `uneven`, so that small rows count as much as large ones."""
    for magnitude in range(min(3, len(wanted))):
        some = wanted[magnitude::3]
        scaled = some.abs().max().clamp(min=1e-3)
        found = on_host(seen)[magnitude::3].double() / scaled
        expect_close(found, some / scaled, TOLERANCE[seen.dtype], what)
