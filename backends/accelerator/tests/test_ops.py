"""Ops of the device against torch's own on the CPU, whose kernels they run: bit for bit, except where torch runs
another formula on devices that are not its own."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

DEVICE = "asynccpu"


def both(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(4).to(dtype)
    return x, x.to(DEVICE)


OPS = {
    "add": lambda x, i: x + 2 * x.flip(0),
    "mixed dtypes": lambda x, i: x.double() + x.half() * 3,
    "matmul": lambda x, i: x @ x.T,
    "batched matmul": lambda x, i: torch.einsum("ij,kj->ikj", x, x) @ x.T,
    "layer norm": lambda x, i: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x, i: x.softmax(-1),
    "sorted": lambda x, i: torch.cat([v.to(torch.float64) for v in x.sort(dim=-1)]),
    "top 2": lambda x, i: torch.cat([v.to(torch.float64) for v in x.topk(2, dim=-1)]),
    "where": lambda x, i: torch.where(x > 0, x, -1.0),
    "mask": lambda x, i: x[x > 0],
    "rows": lambda x, i: x[i % x.shape[0]],
    "put": lambda x, i: x.index_put((i[:1] % x.shape[0],), torch.zeros((), dtype=x.dtype, device=x.device)),
    "scatter": lambda x, i: torch.zeros_like(x).scatter_add_(0, (i[:, None] % x.shape[0])[:, : x.shape[1]], x[:3]),
    "gather": lambda x, i: x.gather(0, (i % x.shape[0])[:, None].expand(3, x.shape[1])),
    "cumulative": lambda x, i: x.cumsum(0).cummax(1).values,
    "masked fill": lambda x, i: x.masked_fill(x.lt(0), 7).tril(1),
    "views": lambda x, i: x.T.unsqueeze(0).expand(3, -1, -1).reshape(-1).view(3, -1)[1:, ::2],
    "in place": lambda x, i: x.clone().mul_(2).clamp_(-3, 3).neg_().index_fill_(0, i[:1] % x.shape[0], 9),
    "integers": lambda x, i: (x.round().long() // 3) ^ i[0],
    "arange": lambda x, i: torch.arange(x.shape[1], device=x.device)[None] < i[:, None] % 5,
    "any": lambda x, i: torch.stack([(x > 2).any(), (x > -9).all(), x.isfinite().all()]),
    "reduce": lambda x, i: torch.stack([x.amax(), x.mean(), x.logsumexp((0, 1)), x.norm()]),
    "one hot": lambda x, i: torch.nn.functional.one_hot(i, 80),
    "embedding": lambda x, i: torch.nn.functional.embedding(i % x.shape[0], x),
    "attention": lambda x, i: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
}

OTHER_FORMULA = {"layer norm", "attention"}


def expect_same(name: str, seen: Tensor, wanted: Tensor) -> None:
    assert seen.device.type == DEVICE
    assert (seen.dtype, seen.shape) == (wanted.dtype, wanted.shape), name
    if name in OTHER_FORMULA:
        torch.testing.assert_close(seen.cpu(), wanted)
    else:
        assert seen.stride() == wanted.stride(), name
        assert torch.equal(seen.cpu().nan_to_num(), wanted.nan_to_num()), name


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(3, 9), st.integers(2, 9), st.data())
def test_an_op_gives_the_bits_of_the_cpu(name: str, seed: int, rows: int, columns: int, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    x, on_device = both(seed, rows, columns, dtype=dtype)
    index = torch.randint(0, 64, (3,), generator=torch.Generator().manual_seed(seed))
    expect_same(name, OPS[name](on_device, index.to(DEVICE)), OPS[name](x, index))


def test_every_op_above_is_run() -> None:
    for name, op in OPS.items():
        x, on_device = both(1, 6, 5)
        index = torch.tensor([3, 60, 17])
        expect_same(name, op(on_device, index.to(DEVICE)), op(x, index))


def test_random_numbers_follow_the_seed_and_differ_from_draw_to_draw() -> None:
    def drawn() -> list[list[float]]:
        torch.manual_seed(3)
        return [torch.randn(8, device=DEVICE).tolist(), torch.rand(8, device=DEVICE).tolist()]

    first = drawn()
    assert drawn() == first
    assert first[0] != first[1]
    many = torch.randn(20_000, device=DEVICE).cpu()
    assert abs(many.mean()) < 0.05
    assert abs(many.std() - 1) < 0.05


def test_an_out_tensor_of_another_shape_is_resized() -> None:
    x = torch.arange(6.0, device=DEVICE).view(2, 3)
    out = torch.empty(1, device=DEVICE)
    torch.mm(x, x.T, out=out)
    assert out.cpu().tolist() == [[5.0, 14.0], [14.0, 50.0]]


def test_a_storage_that_grows_keeps_what_it_held() -> None:
    x = torch.arange(4.0, device=DEVICE)
    x.untyped_storage().resize_(32)
    x.resize_(8)[4:].fill_(9)
    assert x.cpu().tolist() == [0.0, 1.0, 2.0, 3.0, 9.0, 9.0, 9.0, 9.0]
