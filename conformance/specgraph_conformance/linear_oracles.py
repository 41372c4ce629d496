"""The oracle of linears: their parts in float64 on the host, and comparisons that also check rows of small values."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph_conformance.rig import expect_close, on_host

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""The tolerance of a linear's results by dtype, absolute plus relative."""
EPS = 0.04
"""The eps of norms. It is as large as the mean square of the smallest rows of `uneven`, so that a wrong eps shows."""


def normal(
    g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    """Return normally distributed values times `scale`, in host memory."""
    return (torch.randn(shape, generator=g) * scale).to(dtype)


def norm_of(g: torch.Generator, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight of a norm, [size] values around 1."""
    return normal(g, (size,), torch.float32, 1 / 8).add(1).to(dtype)


def small_integers(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Return integers from -3 to 3 as float32: sums of their products are exact, and so the same in every order."""
    return torch.randint(-3, 4, shape, generator=g).float()


def head_of_ties(g: torch.Generator, x: Tensor, vocab: int, every: int = 1) -> Tensor:
    """Return an output projection [vocab, size] of small integers with two equally best tokens for each row of x.

    x holds small integers too. One of the two tokens is in each half of the vocabulary. Their logit leads by more than
    the rounding of half precision.

    Args:
        every: 2 keeps only the token in the second half for every other row.
    """
    half = torch.randint(-1, 2, (vocab // 2, x.shape[1]), generator=g).float()
    tokens = torch.randperm(vocab // 2, generator=g)[: len(x)]
    half[tokens] = x.sign()[: len(tokens)]
    whole = torch.cat((half, half.flip(0)))
    if every > 1:
        whole[tokens[1::every]] = 0
    return whole


def first_of_largest(logits: Tensor) -> Tensor:
    """Return each row's most likely token. Of equals, the one with the lowest id."""
    ids = torch.arange(logits.shape[-1])
    return ids.where(logits == logits.amax(-1, keepdim=True), logits.shape[-1]).amin(-1)


def uneven(g: torch.Generator, rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return [rows, size] with rows of magnitude 0.2, 1 and 5 in turns."""
    magnitude = torch.tensor([0.2, 1.0, 5.0])[torch.arange(rows) % 3]
    return (normal(g, (rows, size)) * magnitude[:, None]).to(dtype)


def normed(x: Tensor, norm: Tensor | None, eps: float = EPS) -> Tensor:
    """Return rms_norm(x) in float64, or x in float64 if `norm` is None."""
    x = x.double()
    return x if norm is None else x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.double()


def gated(packed: Tensor) -> Tensor:
    """Return silu(gate) * up. The first half of the columns of `packed` is the gate, the second half is up."""
    gate, up = packed.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def expect_magnitudes(seen: Tensor, wanted: Tensor, what: str) -> None:
    """Check that `seen` equals `wanted` up to rounding, relative to the largest value of each magnitude of `uneven`.

    Errors in small rows thus count as much as errors in large rows.
    """
    for magnitude in range(min(3, len(wanted))):
        some = wanted[magnitude::3]
        scaled = some.abs().max().clamp(min=1e-3)
        found = on_host(seen)[magnitude::3].double() / scaled
        expect_close(found, some / scaled, TOLERANCE[seen.dtype], what)
