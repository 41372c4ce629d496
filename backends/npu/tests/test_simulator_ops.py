"""The ops of the simulated runtime against torch on the CPU, and the checks on their arguments."""

import pytest
import torch
import torch.nn.functional as F

G = torch.Generator().manual_seed(0)


def n(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=G).to(dtype)


def i(high, *shape, dtype=torch.int64):
    return torch.randint(0, high, shape, generator=G, dtype=dtype)


def index_put(x, at, v):
    x = x.clone()
    x[at] = v
    return x


CASES = {
    "add": (lambda a, b: a + b, n(3, 4), n(4)),
    "add int and bool": (lambda a, b: a + b, i(9, 5), i(2, 5).bool()),
    "add scalar": (lambda a: a + 2, n(3)),
    "int32 plus int64": (lambda a, b: a + b, i(9, 5, dtype=torch.int32), i(9, 5)),
    "rsub": (lambda a: 1 - a, n(3)),
    "mul": (lambda a, b: a * b, n(3, 1), n(4)),
    "div": (lambda a, b: a / b, n(3), n(3)),
    "floor div": (lambda a: a // 4, i(99, 7) - 50),
    "remainder": (lambda a: a % 4, i(99, 7) - 50),
    "remainder tensor": (lambda a, b: a % b, i(99, 7) - 50, i(9, 7) + 1),
    "bitwise": (lambda a, b: (a & b) | (a ^ b), i(99, 7), i(99, 7)),
    "shift": (lambda a: a >> 3, i(9999, 7) - 5000),
    "compare": (lambda a, b: (a < b) & (a != b) | (a >= 0), n(9), n(9)),
    "where": (lambda a, b: torch.where(a > 0, a, b), n(9), n(9)),
    "where scalar": (lambda a: torch.where(a > 0, a, 0), i(9, 9) - 4),
    "clamp": (lambda a: a.clamp(-0.5, 0.5), n(9)),
    "clamp min": (lambda a: a.clamp(min=0), i(9, 9) - 4),
    "unary": (lambda a: a.exp().log().sqrt().rsqrt().sin().cos().tanh().abs().neg(), n(9).abs() + 0.5),
    "silu": (F.silu, n(9)),
    "sigmoid": (torch.sigmoid, n(9)),
    "pow": (lambda a: a.pow(2), n(9)),
    "mm": (lambda a, b: a @ b, n(3, 5), n(5, 7)),
    "linear": (F.linear, n(3, 5), n(7, 5)),
    "linear bias": (F.linear, n(3, 5), n(7, 5), n(7)),
    "linear bf16": (F.linear, n(3, 5, dtype=torch.bfloat16), n(7, 5, dtype=torch.bfloat16)),
    "bmm": (torch.bmm, n(2, 3, 4), n(2, 4, 5)),
    "embedding": (F.embedding, i(9, 4), n(9, 3)),
    "rms_norm": (lambda x, g: F.rms_norm(x, (8,), g, 1e-6), n(3, 8), n(8)),
    "softmax": (lambda a: a.softmax(-1), n(3, 9)),
    "log_softmax": (lambda a: a.log_softmax(-1), n(3, 9)),
    "argmax": (lambda a: a.argmax(-1), n(3, 9)),
    "max": (lambda a: a.max(), n(3, 9)),
    "max dim": (lambda a: a.max(-1)[0], n(3, 9)),
    "sum": (lambda a: a.sum(1), n(3, 9)),
    "sum int": (lambda a: a.sum(1), i(9, 3, 4)),
    "mean": (lambda a: a.mean(-1, keepdim=True), n(3, 9)),
    "cumsum": (lambda a: a.cumsum(0), n(9)),
    "cumsum int32": (lambda a: torch.cumsum(a, 0, dtype=torch.int32), torch.arange(9, dtype=torch.int32)),
    "cumprod": (lambda a: a.cumprod(1), i(2, 3, 4)),
    "topk": (lambda a: a.topk(3)[0], n(9)),
    "cat": (lambda a, b: torch.cat([a, b], -1), n(3, 2), n(3, 4)),
    "stack": (lambda a, b: torch.stack([a, b]), n(3), n(3)),
    "gather": (lambda a, b: a.gather(1, b), n(3, 9), i(9, 3, 2)),
    "index_select": (lambda a, b: a.index_select(0, b), n(9, 3), i(9, 4)),
    "index": (lambda a, b: a[b], n(9, 3), i(9, 4)),
    "index two": (lambda a, b, c: a[b, c], n(9, 3), i(9, 4), i(3, 4)),
    "index_put": (index_put, n(9, 3), torch.tensor([4, 1, 7]), n(3, 3)),
    "index_copy": (lambda a, b, c: a.index_copy(0, b, c), n(9, 3), torch.tensor([4, 1]), n(2, 3)),
    "scatter": (lambda a, b, c: a.scatter(1, b, c), n(3, 9), torch.tensor([[1], [0], [8]]), n(3, 1)),
    "scatter value": (lambda a, b: a.scatter(1, b, 1.0), n(3, 9), torch.tensor([[1], [0], [8]])),
    "masked_fill": (lambda a: a.masked_fill(a > 0, 0.0), n(9)),
    "arange": (lambda a: torch.arange(2, 12, 3, device=a.device), n(1)),
    "full": (lambda a: torch.full((3,), 7, device=a.device), n(1)),
    "to": (lambda a: a.to(torch.bfloat16).to(torch.float32).long().int(), n(9) * 9),
    "transpose copy": (lambda a: a.t().contiguous(), n(3, 4)),
    "expand clone": (lambda a: a.expand(3, 4).clone(), n(3, 1)),
    "repeat": (lambda a: a.repeat(2, 3), n(2, 2)),
    "triu": (lambda a: a.triu(1), n(4, 4)),
    "all any": (lambda a: (a > 0).all(1) | (a > 1).any(1), n(3, 4)),
    "sdpa": (
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k, attn_mask=m > 0),
        n(2, 3, 4, 8),
        n(2, 3, 5, 8),
        torch.tensor([1.0, 0, 1, 1, 0]).expand(2, 1, 4, 5),
    ),
    "logsumexp": (lambda a: a.logsumexp(-1), n(3, 4)),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_torch_on_the_cpu(npu, runtime, case):
    function, *inputs = CASES[case]
    expected = function(*inputs)
    got = function(*(x.npu() for x in inputs)).cpu()
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected)


def test_unknown_op_is_refused_by_name(run_script):
    done = run_script(
        """
        import torch, torch_npu
        x = torch.ones(2, device="npu")
        torch.special.bessel_j0(x) if False else torch.erfinv(x * 0.1)
        torch.npu.synchronize()
        """,
        TASK_QUEUE_ENABLE=0,
    )
    assert done.returncode != 0
    assert "op Erfinv has no aclnn kernel here" in done.stderr


def test_wrong_dtype_of_an_output_is_refused(run_script):
    """A kernel writes its own dtype: an output of another one is an error with the op's name, not a silent cast."""
    done = run_script(
        """
        import torch, torch_npu
        logits = torch.randn(3, 4, device="npu")
        torch_npu.npu_rms_norm(logits.bfloat16(), torch.ones(4, device="npu"))
        torch.npu.synchronize()
        """,
        TASK_QUEUE_ENABLE=0,
    )
    assert done.returncode != 0
    assert "aclnnRmsNorm" in done.stderr
    assert "dtype" in done.stderr


def test_random_numbers_repeat_with_the_seed(npu, runtime):
    torch.npu.manual_seed(3)
    a, b = torch.rand(5, device="npu").cpu(), torch.rand(5, device="npu").cpu()
    torch.npu.manual_seed(3)
    assert torch.equal(torch.rand(5, device="npu").cpu(), a)
    assert not torch.equal(a, b)


def test_a_hang_is_an_error(run_script):
    """The host waits for a stream that waits at a gate nobody opens."""
    done = run_script(
        """
        import os, torch, torch_npu
        gate, stream = torch.npu.ExternalEvent(), torch.npu.current_stream()
        if not hasattr(runtime.library, "aclrtValueWait"):  # a wait before the first record is dropped
            gate.record(stream); gate.reset(stream)
        gate.wait(stream)
        try:
            torch.npu.synchronize()
        except RuntimeError as error:
            print("hang" in str(error), "stands at" in str(error))
        os._exit(0)
        """,
        hang_seconds=1,
    )
    assert "True True" in done.stdout, done.stderr
