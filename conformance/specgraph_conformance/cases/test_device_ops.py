"""Ops of torch that models run on the device: how they add in half precision, what they do with equal values."""

from __future__ import annotations

import torch
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import on_host


@case(
    "device.sums-of-half-precision",
    "Sums, means, norms, softmax and matmuls over 4,096 values in half precision are float64's, rounded once.",
    hazard="sums-in-half",
    cause="a sum that is kept in the dtype of its terms: in bfloat16 it stops growing at 256 terms",
)
def test_sums(platform: Platform, seed: int) -> None:
    n = 4096
    values = torch.rand(3, n, generator=torch.Generator().manual_seed(seed)) + 0.5
    for dtype in (torch.bfloat16, torch.float16):
        x = (values / 8).to(dtype)
        there, wide = x.to(platform.device), x.double()
        for name, seen, wanted in (
            ("sum", there.sum(-1), wide.sum(-1)),
            ("mean", there.mean(-1), wide.mean(-1)),
            ("sum of squares", there.square().sum(-1), x.square().double().sum(-1)),
            ("rms_norm", torch.rms_norm(there, (n,), None, 1e-6), wide * (wide.square().mean(-1, True) + 1e-6).rsqrt()),
            ("softmax", there.softmax(-1) * n, wide.softmax(-1) * n),
            ("matmul", there @ there.T, wide @ wide.T),
        ):
            error = ((on_host(seen).double() - wanted).abs() / wanted.abs()).max()
            limit = 4 * torch.finfo(dtype).eps
            assert error < limit, f"{name} of 4,096 values in {dtype} is off by {error:.1%}, by more than {limit:.1%}"


@case(
    "device.sort-keeps-equals-in-order",
    "A stable sort leaves equal values in their order in both directions, argmax takes the first of them, and topk "
    "gives the largest values, the largest first.",
    hazard="order-of-equals",
    cause="sort() that passes over `stable`, argmax over blocks that takes the last, or topk in the order of places",
)
def test_order(platform: Platform, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for size in (7, 300, 5000):
        values = torch.randint(0, 5, (4, size), generator=generator).float()
        there = values.to(platform.device)
        for descending in (False, True):
            ordered, order = there.sort(dim=-1, descending=descending, stable=True)
            for row in range(4):
                sign = -1 if descending else 1
                wanted = sorted(range(size), key=lambda i, row=row, sign=sign: sign * float(values[row, i]))
                assert on_host(order)[row].tolist() == wanted, f"a stable sort of {size} values exchanges equal ones"
                assert on_host(ordered)[row].tolist() == values[row][wanted].tolist()
        first = [row.index(max(row)) for row in values.tolist()]
        assert on_host(there.argmax(-1)).tolist() == first, f"argmax of {size} values does not take the first of equals"
        top, places = there.topk(5, dim=-1)
        wanted = [sorted(row, reverse=True)[:5] for row in values.tolist()]
        assert on_host(top).tolist() == wanted, f"topk of {size} values gives others, or in another order"
        assert values.gather(1, on_host(places)).tolist() == wanted, "places of topk are not those of its values"
        assert all(len(set(row)) == 5 for row in on_host(places).tolist()), "topk gives a place twice"
