"""Random programs: whatever ops follow each other on whatever views, a replay gives eager's bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specgraph.cpu import CpuPlatform

ROWS, COLUMNS = 4, 6
NUMBERS = st.sampled_from([0, 1, -1, 3, 0.5, -2.25, True])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32])

VIEWS = {
    "whole": lambda t: t,
    "transposed twice": lambda t: t.t().t(),
    "rows backwards by index": lambda t: t.index_select(0, torch.arange(ROWS - 1, -1, -1)),
    "every other twice": lambda t: torch.cat([t[:, ::2], t[:, 1::2]], 1),
    "as columns": lambda t: t.t().reshape(ROWS, COLUMNS),
    "split and joined": lambda t: torch.cat(t.split([1, 3]), 0),
    "stacked": lambda t: torch.stack(t.unbind(0)),
    "one row expanded": lambda t: t[1].expand(ROWS, COLUMNS),
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "div": torch.true_divide,
    "where": lambda a, b: torch.where(a > b, a, b),
    "eq": torch.eq,
    "outer": lambda a, b: (a.float() @ b.float().t()).repeat(1, 2)[:, :COLUMNS],
    "gather": lambda a, b: a.gather(1, b.to(torch.int64).abs() % COLUMNS),
    "scatter_add": lambda a, b: a.float().scatter_add(0, b.to(torch.int64).abs() % ROWS, b.float()),
}
UNARY = {
    "neg": lambda t, n: -t,
    "abs": lambda t, n: t.abs(),
    "plus number": lambda t, n: t + n,
    "number minus": lambda t, n: n - t if n is not True else 1 - t,
    "times number": lambda t, n: t * n,
    "over number": lambda t, n: t / (n or 2),
    "softmax": lambda t, n: t.float().softmax(-1),
    "sum": lambda t, n: t.sum(1, keepdim=True).expand(ROWS, COLUMNS),
    "cumsum": lambda t, n: t.cumsum(0),
    "clamp": lambda t, n: t.clamp(-3, 3),
    "sorted": lambda t, n: t.sort(1)[0],
    "full": lambda t, n: torch.full_like(t, n),
    "clone": lambda t, n: t.clone(memory_format=torch.contiguous_format),
    "topk": lambda t, n: t.topk(3, 1)[0].repeat(1, 2),
    "norm": lambda t, n: torch.nn.functional.layer_norm(t.float(), (COLUMNS,)),
}
IN_PLACE = {
    "add_": lambda t, o, n: t.add_(o.to(t.dtype), alpha=2),
    "mul_": lambda t, o, n: t.mul_(int(n)),
    "copy_": lambda t, o, n: t.copy_(o),
    "row = number": lambda t, o, n: t[1].fill_(int(n)),
    "corner = other": lambda t, o, n: t[:2, 1:3].copy_(o[2:, 3:5]),
    "index_put": lambda t, o, n: t.index_put_((torch.arange(3),), o[1:].to(t.dtype)),
    "masked_fill": lambda t, o, n: t.masked_fill_(o > 0, int(n)),
    "out": lambda t, o, n: torch.add(t, o.to(t.dtype), out=t),
}

STEP = st.one_of(
    st.tuples(st.just("view"), st.sampled_from(sorted(VIEWS)), st.integers(0, 99)),
    st.tuples(st.just("binary"), st.sampled_from(sorted(BINARY)), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.just("unary"), st.sampled_from(sorted(UNARY)), st.integers(0, 99), NUMBERS),
    st.tuples(st.just("cast"), DTYPES, st.integers(0, 99)),
    st.tuples(st.just("in place"), st.sampled_from(sorted(IN_PLACE)), st.integers(0, 1), st.integers(0, 99), NUMBERS),
    st.tuples(st.just("drop"), st.integers(0, 99)),
)


def run(program, inputs):
    """Tensors are picked by number from those alive; in-place ops write the inputs only."""
    alive = list(inputs)

    def pick(i):
        return alive[i % len(alive)]

    for kind, *rest in program:
        if kind == "view":
            alive.append(VIEWS[rest[0]](pick(rest[1])))
        elif kind == "binary":
            a, b = pick(rest[1]), pick(rest[2])
            alive.append(BINARY[rest[0]](a, b))
        elif kind == "unary":
            alive.append(UNARY[rest[0]](pick(rest[1]), rest[2]))
        elif kind == "cast":
            alive.append(pick(rest[1]).to(rest[0]))
        elif kind == "in place":
            other = pick(rest[2]).clone()  # an input may be part of itself: undefined in eager too
            IN_PLACE[rest[0]](alive[rest[1]], other, rest[3])
        elif len(alive) > len(inputs):
            del alive[len(inputs) + rest[0] % (len(alive) - len(inputs))]
    return alive[len(inputs) :]


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEP, min_size=1, max_size=25), DTYPES, st.booleans(), st.integers(0, 2**31))
@pytest.mark.filterwarnings("ignore:.*non-writable.*")
def test_random_program(program, dtype, inference, seed):
    torch.manual_seed(seed)
    first = [(torch.randn(ROWS, COLUMNS) * 3).to(dtype), torch.randn(ROWS, COLUMNS)]
    grad_mode = torch.inference_mode if inference else torch.no_grad
    with grad_mode():
        try:
            run(program, [t.clone() for t in first])
        except (RuntimeError, NotImplementedError):
            return  # eager refuses it: nothing to compare
        live, eager = [t.clone() for t in first], [t.clone() for t in first]
        graph = CpuPlatform().graph()
        with graph.capture():
            results = run(program, live)
        assert all(map(same, live, first)), "the capture executed something"
        for _ in range(2):
            graph.replay()
            expected = run(program, eager)
            assert all(map(same, live, eager))
            assert len(results) == len(expected)
            assert all(map(same, results, expected))
