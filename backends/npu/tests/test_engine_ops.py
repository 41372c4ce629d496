"""The ops that vllm-ascend calls and the backend does not: values against torch on the CPU, and refusals.

All limits are on: the shapes and dtypes are those that a device takes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("all_limits")

G = torch.Generator().manual_seed(1)
BF16 = torch.bfloat16


def n(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=G).to(dtype)


@pytest.fixture(scope="module")
def vendor(npu):
    """torch_npu, imported."""
    import torch_npu

    return torch_npu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("shape", [(8,), (4, 8)])
def test_add_rms_norm(vendor, runtime, dtype, shape):
    a, b, gamma = n(3, 4, 8, dtype=dtype), n(3, 4, 8, dtype=dtype), n(*shape, dtype=dtype)
    y, rstd, total = (t.cpu() for t in vendor.npu_add_rms_norm(a.npu(), b.npu(), gamma.npu(), 1e-5))
    assert torch.equal(total, a + b)
    exact = total.double()
    scale = exact.pow(2).mean([-1] if len(shape) == 1 else [-2, -1], keepdim=True).add(1e-5).rsqrt()
    torch.testing.assert_close(rstd.double(), scale, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(y.double(), exact * scale * gamma.double(), rtol=2e-2, atol=2e-2)
    assert (y.dtype, rstd.dtype, rstd.dim()) == (dtype, torch.float32, 3)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, -1), (BF16, -1), (torch.float16, 0)])
def test_swiglu(vendor, runtime, dtype, dim):
    x = n(4, 6, dtype=dtype)
    gate, up = x.double().chunk(2, dim)
    got = vendor.npu_swiglu(x.npu(), dim).cpu()
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), F.silu(gate) * up, rtol=1e-2, atol=1e-2)


def test_nan_to_num(vendor, runtime):
    x = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    assert torch.equal(x.npu().nan_to_num(nan=3.0).cpu(), x.nan_to_num(nan=3.0))


def test_a_sum_of_products(vendor, runtime):
    x, weight, total = n(2, 4, dtype=BF16), n(2, 3, dtype=BF16), n(4, 3)
    got = total.npu()
    vendor._npu_matmul_add_fp32(x.npu(), weight.npu(), got)
    torch.testing.assert_close(got.cpu(), total + x.float().T @ weight.float())


@pytest.mark.parametrize("halves", [True, False], ids=["halves", "neighbours"])
def test_rotary_embedding(run_script, halves):
    """In a process of its own: op-plugin keeps the first cos and sin that it sees for the life of a process."""
    done = run_script(
        f"""
        import torch, torch_npu
        def n(*shape): return torch.randn(*shape, generator=G).bfloat16()
        G, dim, halves = torch.Generator().manual_seed(0), 32, {halves}
        positions = torch.tensor([5, 0, 9])
        angles = torch.arange(10)[:, None] * 0.7 ** torch.arange(dim // 2)
        table = torch.cat([angles.cos(), angles.sin()], 1).bfloat16()
        tensors = [n(3, heads * dim) for heads in (4, 2)]
        expected = []
        for x in tensors:
            x = x.double().view(3, -1, dim)
            a, b = x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])
            cos, sin = (t[:, None] for t in table[positions].double().chunk(2, -1))
            turned = a * cos - b * sin, b * cos + a * sin
            expected.append((torch.cat(turned, -1) if halves else torch.stack(turned, -1)).reshape(3, -1))
        query, key = (x.npu() for x in tensors)
        torch_npu._npu_rotary_embedding(positions.npu(), query, key, dim, table.npu(), halves)
        for x, y in zip((query, key), expected):
            torch.testing.assert_close(x.cpu().double(), y, rtol=2e-2, atol=2e-2)
        print(runtime.report()["calls"]["RopeOperation"], runtime.report()["violations"])
        """,
        lenient="",
    )
    assert done.stdout.endswith("1 []\n"), done.stderr


@pytest.mark.parametrize("halves", [True, False], ids=["halves", "neighbours"])
@pytest.mark.parametrize("turned", [64, 32], ids=["whole", "partial"])
def test_rotary_embedding_by_positions(vendor, runtime, halves, turned):
    dim, positions = 64, torch.tensor([5, 0, 9])
    angles = torch.arange(10)[:, None] * 0.7 ** torch.arange(turned // 2)
    table = torch.cat([angles.cos(), angles.sin()], 1).to(BF16)
    given = [n(3, heads * dim, dtype=BF16) for heads in (4, 2)]
    mode = {"mrope_section": [0, 0, 0], "rotary_mode": "half" if halves else "interleave"}
    made = vendor.npu_mrope(positions.npu(), *(x.npu() for x in given), table.npu(), dim, **mode)
    cos, sin = (part[:, None] for part in table[positions].double().chunk(2, -1))
    for x, got in zip(given, made, strict=True):
        whole = x.double().view(3, -1, dim)
        part, rest = whole[..., :turned], whole[..., turned:]
        a, b = part.chunk(2, -1) if halves else (part[..., ::2], part[..., 1::2])
        both = a * cos - b * sin, b * cos + a * sin
        part = torch.cat(both, -1) if halves else torch.stack(both, -1).flatten(-2)
        torch.testing.assert_close(got.cpu().double(), torch.cat([part, rest], -1).view(3, -1), rtol=2e-2, atol=2e-2)


def test_cache_writes_skip_negative_slots(vendor, runtime):
    key, value, slots = n(3, 2, 16, dtype=BF16), n(3, 2, 16, dtype=BF16), torch.tensor([17, -1, 3], dtype=torch.int32)
    caches = [torch.zeros(2, 16, 2, 16, dtype=BF16, device="npu") for _ in range(2)]
    vendor._npu_reshape_and_cache(key.npu(), value.npu(), *caches, slots.npu())
    for rows, cache in zip((key, value), caches, strict=True):
        expected = torch.zeros(32, 2, 16, dtype=BF16)
        expected[[17, 3]] = rows[[0, 2]]
        assert torch.equal(cache.cpu().flatten(0, 1), expected)


def kept(row: torch.Tensor, k: int | None, p: float | None) -> set[int]:
    """The logits' places that top-k and top-p leave, by exact arithmetic; without ties."""
    order = row.double().sort(descending=True).indices[:k]
    if p is None:
        return set(order.tolist())
    before = row.double()[order].softmax(-1).cumsum(-1) - row.double()[order].softmax(-1)
    return {int(place) for place, sum_ in zip(order, before, strict=True) if sum_ < p or place == order[0]}


@pytest.mark.parametrize(("ks", "ps"), [([1, 4, 50], [0.9, 0.5, 0.1]), ([2, 7, 50], None), (None, [1.0, 0.7, 0.0])])
def test_top_k_top_p(vendor, runtime, ks, ps):
    logits = n(3, 50)
    k = None if ks is None else torch.tensor(ks, dtype=torch.int32).npu()
    p = None if ps is None else torch.tensor(ps).npu()
    got = vendor.npu_top_k_top_p(logits.npu(), p, k).cpu()
    for i, row in enumerate(logits):
        left = got[i].isfinite().nonzero().flatten().tolist()
        assert set(left) == kept(row, ks and ks[i], ps and ps[i])
        assert torch.equal(got[i][left], row[left])


REFUSED = {
    "x2, gamma, y or x differs from x1 in dtype": lambda v, a: v.npu_add_rms_norm(a, a.half(), a[0]),
    "x2, y or x differs from x1 in shape": lambda v, a: v.npu_add_rms_norm(a, a[:2], a[0]),
    "gamma must have the last dimensions of x1": lambda v, a: v.npu_add_rms_norm(a, a, a[0, :3]),
    "of size 7 has no halves": lambda v, a: v.npu_swiglu(a[:, :7].contiguous()),
    "x has gaps between its rows": lambda v, a: v.npu_swiglu(a[:, :6]),
    "x is Int": lambda v, a: v.npu_swiglu(a.int()),
    "k must be one int32 per row": lambda v, a: v.npu_top_k_top_p(a, a[:, 0], a[:, 0].long()),
    "p must be one number per row": lambda v, a: v.npu_top_k_top_p(a, a[0], None),
    "p must be one number per row, of logits' dtype": lambda v, a: v.npu_top_k_top_p(a, a[:, 0].half(), None),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_refused_calls(vendor, runtime, why):
    with pytest.raises(RuntimeError, match=why):
        REFUSED[why](vendor, n(3, 8).npu())


ATB_REFUSED = """
import ctypes, torch, torch_npu
v, rows, cache = torch_npu, torch.zeros(3, 2, 16).bfloat16().npu(), torch.zeros(2, 16, 2, 16).bfloat16().npu()
slots, sums, flat, table = torch.arange(3).int().npu(), torch.zeros(16, 16).npu(), rows.view(3, 32), cache.view(64, 16)
reason = runtime.library.aclGetRecentErrMsg
reason.restype = ctypes.c_char_p
calls = {
    "x and weight must be float16 or bfloat16": lambda: v._npu_matmul_add_fp32(sums, sums, sums),
    "the sum must be [m, n]": lambda: v._npu_matmul_add_fp32(rows[:, 0], rows[:, 0], sums[:3]),
    "limit 'atb-cache'": lambda: v._npu_reshape_and_cache(*[t.float() for t in (rows, rows, cache, cache)], slots),
    "slots are Long (limit 'atb-cache'": lambda: v._npu_reshape_and_cache(rows, rows, cache, cache, slots.long()),
    "rows and caches differ in heads": lambda: v._npu_reshape_and_cache(rows[:, :1], rows, cache, cache, slots),
    "2 slots": lambda: v._npu_reshape_and_cache(rows, rows, cache, cache, slots[:2]),
    "are no heads of 16": lambda: v._npu_rotary_embedding(slots, flat[:, :24].contiguous(), flat, 16, table, True),
    "limit 'atb-rope'": lambda: v._npu_rotary_embedding(slots, flat.float(), flat.float(), 16, table, True),
}
for why, call in calls.items():
    try:
        call()
        print("taken:", why)
    except RuntimeError as error:
        said = reason().decode()
        print("refused" if "setup failed" in str(error) and why in said else f"{why}: {said}")
"""


def test_refused_atb_calls(run_script):
    """torch_npu's error says which operation's setup failed; the reason is in the runtime's last message."""
    done = run_script(ATB_REFUSED, lenient="", TASK_QUEUE_ENABLE=0)
    assert done.stdout.splitlines() == ["refused"] * 8, done.stdout + done.stderr


def test_limits_that_are_off(run_script):
    done = run_script(ATB_REFUSED, lenient="atb-cache,atb-rope", TASK_QUEUE_ENABLE=0)
    assert [line for line in done.stdout.splitlines() if line != "refused"] == [
        "taken: limit 'atb-cache'", "taken: slots are Long (limit 'atb-cache'", "taken: limit 'atb-rope'",
    ], done.stdout + done.stderr  # fmt: skip


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            "torch_npu.npu_top_k_top_p(torch.zeros(1, 2000).npu(), None, torch.tensor([1025]).int().npu())",
            "limit 'top-k'",
        ),
        (
            "torch_npu._npu_reshape_and_cache(rows, rows, cache, cache, torch.tensor([3, 3]).int().npu())",
            "limit 'atb-cache'",
        ),
        (
            "torch_npu._npu_reshape_and_cache(rows, rows, cache, cache, torch.tensor([3, 32]).int().npu())",
            "is past the cache",
        ),
    ],
)
def test_values_on_the_device(run_script, call, why):
    code = f"""
    import torch, torch_npu
    rows, cache = torch.zeros(2, 2, 16).bfloat16().npu(), torch.zeros(2, 16, 2, 16).bfloat16().npu()
    {call}
    try:
        torch.npu.synchronize()
        print("taken")
    except RuntimeError as error:
        print(error)
    """
    assert why in run_script(code, lenient="", TASK_QUEUE_ENABLE=0).stdout
    lenient = run_script(code, lenient="all", TASK_QUEUE_ENABLE=0).stdout
    assert ("taken" in lenient) == why.startswith("limit")
