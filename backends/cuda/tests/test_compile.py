"""Every Triton op compiles, down to a binary, for a GPU that need not be there. Skipped where Triton is not installed.

The ops run on CPU tensors, and each launch is turned into a compilation. What the kernels compute is not looked at.
"""

# ruff: noqa: E402  (the tests are skipped before anything imports Triton)
from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

import specgraph_cuda.kernels
from specgraph_cuda.kernels import attention_for, on_its_device, overlap_previous, tile_for
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specgraph import ops as declared
from specgraph.ops import (
    Acceptance,
    AcceptedPath,
    Beams,
    Candidates,
    DeviceLengths,
    Drafts,
    Draws,
    Head,
    KVCache,
    Mask,
    NewRows,
    Norm,
    PairInput,
    Sampled,
    SamplingParameters,
    TreeNodes,
    Weight,
)
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows
from specgraph.ops.copies import RoundTensors
from specgraph.ops.past_rows import PastRows
from specgraph.ops.triton.implement import TritonOps
from specgraph.ops.triton.launch import LaunchOptions


class Driver:
    """A CUDA driver that names a target and has no device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # a device of its own per target: Triton keeps its compiler per device

    def get_current_stream(self, device: int = 0) -> int:
        return 0


AMPERE = (80, LaunchOptions())
HOPPER = (
    90,
    LaunchOptions(
        overlap=overlap_previous, extra={"launch_pdl": True}, tile=tile_for, attention=attention_for, float8=True
    ),
)


@pytest.fixture(params=[AMPERE, HOPPER], ids=["sm_80", "sm_90-overlap"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TritonOps]:
    capability, options = request.param
    if options.overlap and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):
        pytest.skip("launch_pdl needs Triton 3.4")
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: run(*args, **{**kwargs, "warmup": True}))
    driver.set_active(Driver(capability))
    yield TritonOps(options)
    with contextlib.suppress(RuntimeError):  # no GPU: there is no driver to go back to
        driver.reset_active()


def i32(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def i64(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


class Call(NamedTuple):
    """Arguments of one op; `x` makes tensors of the dtype under test."""

    op: str
    make: Callable[[Callable[..., Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]


def _attend(rows: int, kind: str, dim: int = 64) -> Call:
    """Attention of that kind: it "stores" its rows, does not ("attends"), or has the rows of a "tree"."""

    def make(x: Callable[..., Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        n, cache = 2 * rows, KVCache(x(6, 16, 2, dim), x(6, 16, 2, dim))
        lengths = DeviceLengths(i32(2), i32(3), rows)
        mask = Mask(causal=False, ancestors=i64(n), tree_len=8) if kind == "tree" else Mask()
        new = NewRows(x(n, 2, dim), x(n, 2, dim), torch.zeros(256, dim), i64(n), i64(n)) if kind == "stores" else None
        return (x(n, 4, dim), cache, i32(2, 3), lengths, mask, new), {"scale": 0.125}

    return Call("paged_attention", make)


def _store(x: Callable[..., Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    new = NewRows(x(4, 2, 64), x(4, 2, 64), torch.zeros(256, 64), i64(4), i64(4))
    return (x(4, 4, 64), new, KVCache(x(6, 16, 2, 64), x(6, 16, 2, 64))), {}


def _draw(head: bool, block: bool, drawn: bool) -> Call:
    """3 rows: of 3 requests, or without a step of one."""
    vocab, requests = (1000 if head else 500), (1 if block else 3)
    drafts = Drafts(i64(1, 3)) if block else Drafts(i64(3, 4), None, i64(1), i64(3))
    probs = torch.zeros(*drafts.draft_token_ids.shape, vocab)
    positions = (i64(requests), i32(requests)) if block else (i32(requests), None)
    draws = Draws(torch.zeros(requests), i64(requests), *positions, probs) if drawn else None
    if head:
        weights = lambda x: (x(3, 256), Head(x(256), 1e-6, x(vocab, 256)))  # noqa: E731
        return Call("draft_from_hidden", lambda x: ((*weights(x), drafts, draws), {}))
    return Call("draft_from_logits", lambda x: ((x(3, vocab), drafts, draws), {}))


def _kept(x: Callable[..., Tensor]) -> PastRows:
    return PastRows(i64(9, 2), i64(9, 2), x(9, 2, 64))


def _begin(plan: RowPlan, given: RowInputs, *names: str, modules: bool = False) -> Call:
    """The first op of a pass over 2 requests; `modules`: with the hidden states of 4 columns and 2 past rows."""
    sizes = {"step_seq_lens": 2, "step_positions": 2, "draft_step": 1, "rows_without_block": 1, "last_rows": 2}
    names = (*ROWS[given.token_ids is None :], *names)
    out = {name: i64(sizes.get(name, 2 * plan.rows)) for name in names}
    out |= {name: i32(2) for name in out if name.endswith("seq_lens")}

    def make(x: Callable[..., Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not modules:
            return (given, plan, Rows(**out)), {}
        rows = Rows(**out, hidden=x(2 * plan.rows, 64))
        return (given._replace(hidden=x(8, 64)), plan, rows, _kept(x)), {}

    return Call("begin_rows", make)


def _pair(width: int, hidden: int) -> Call:
    def make(x: Callable[..., Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            i64(3),
            x(3, hidden),
            PairInput(x(100, width), x(width), x(hidden), 1e-6),
            Weight(x(512, width + hidden)),
        ), {}

    return Call("pair_linear", make)


def _verify(acceptance: Acceptance) -> Call:
    columns = 500 if acceptance.draft_to_target is not None or acceptance.draft_probs is None else 300
    given = i64(2, 3), i64(2), acceptance, Sampled(i64(2, 4), i32(2))
    return Call("verify_drafts", lambda x: ((x(8, columns), *given), {}))


DRAWN = Acceptance(torch.zeros(2), i64(2))
ACCEPTANCES = [
    Acceptance(),
    Acceptance(seeds=i64(2), chances=torch.zeros(3)),
    DRAWN,
    DRAWN._replace(draft_probs=torch.zeros(2, 3, 300)),
    DRAWN._replace(draft_probs=torch.zeros(2, 3, 300), draft_to_target=i64(300)),
]
LIMITS = {"max_model_len": 64, "block_size": 16}
ROWS = ("token_ids", "positions", "slot_mapping", "seq_lens")
ROUND = (i64(2, 4), i32(2), i64(2))
STEPS = ("last_rows", "step_positions", "step_seq_lens", "draft_step")
GIVEN = RowInputs(i64(2), i32(2, 3), i32(2), i64(2, 4))

TREE = TreeNodes(i64(2, 7), i64(2, 7))
PATH = Sampled(i64(2, 4), i32(2)), AcceptedPath(i64(8), i64(6), i64(6))


def _grow(first: bool, k: int) -> Call:
    rows, count = 2 * (1 if first else k), k + 2 * k * k
    candidates = Candidates(torch.zeros(2, count), i64(2, count), i64(2, count))
    beams = Beams(torch.zeros(2, k), i64(2, k), i64(2 * k), i64(2 * k), i64(2 * k))
    return Call("grow_tree", lambda x: ((x(rows, 9000), i64(9000), i64(1), first, candidates, beams), {}))


def _adjust(mapped: bool) -> Call:
    floats, vocab, columns = torch.zeros(2), 9000, 3000 if mapped else 9000
    tables = torch.zeros(2, vocab), i32(2, vocab), torch.zeros(2, vocab, dtype=torch.bool)
    asked = SamplingParameters(i64(2), *([floats] * 5), *tables)
    more = (i64(8), i64(columns)) if mapped else ()
    return Call("adjust_logits", lambda x: ((x(8, columns), floats, asked, i64(2, 3), *more), {}))


CALLS = [
    *[_adjust(mapped) for mapped in (False, True)],
    *[_grow(first, k) for first in (True, False) for k in (3, 4)],
    Call("draft_block_tree", lambda x: ((x(6, 9000), i64(9000), 4, TreeNodes(i64(2, 15), i64(2, 15))), {})),
    Call("choose_nodes", lambda x: ((Candidates(torch.zeros(2, 36), i64(2, 36), i64(2, 36)), TREE), {})),
    Call(
        "advance_tree",
        lambda x: (
            (i32(2), i64(2), i32(2, 3)),
            {
                **LIMITS,
                "tree_len": 8,
                "seq_lens": i32(2),
                "positions": i64(8),
                "slot_mapping": i64(8),
                "draft_step": i64(1),
            },
        ),
    ),
    *[
        Call("verify_tree", lambda x, how=how: ((x(16, 500), TREE, i64(2), i64(16), i64(16), how, *PATH), {}))
        for how in ACCEPTANCES[:2]
    ],
    Call("move_kv", lambda x: ((x(6, 16, 2, 64), x(6, 16, 2, 64), i64(5), i64(5)), {})),
    Call("rotate_and_store", _store),
    _attend(8, "tree"),
    *[_attend(rows, kind) for rows in (1, 2, 6) for kind in ("attends", "stores")],
    *[_attend(rows, "stores", dim) for rows in (1, 6) for dim in (16, 96, 128, 256)],
    Call("norm_linear", lambda x: ((x(3, 256), Norm(x(256), 1e-6), Weight(x(512, 256))), {})),
    Call("norm_linear", lambda x: ((x(3, 256), None, Weight(x(512, 256)), x(3, 512)), {})),
    Call("norm_gate_up", lambda x: ((x(3, 256), Norm(x(256), 1e-6), Weight(x(1024, 256))), {})),
    *[Call("norm_linear", lambda x, n=n: ((x(n, 512), None, Weight(x(512, 512))), {})) for n in (3, 40)],
    *[Call("norm_gate_up", lambda x, n=n: ((x(n, 512), None, Weight(x(1024, 512))), {})) for n in (3, 40)],
    *[
        Call(
            op,
            lambda x, n=n: ((x(n, 512), Weight(x(512, 512)), x(n, 512), Norm(x(512), 1e-6), Weight(x(1024, 512))), {}),
        )
        for op in ("linear_norm_linear", "linear_norm_gate_up")
        for n in (3, 40, 65)
    ],
    Call(
        "greedy_next_step",
        lambda x: (
            (
                x(3, 512),
                Head(x(512), 1e-6, x(1000, 512)),
                Drafts(i64(3, 4), i64(1000), i64(1), i64(3)),
                i32(3),
                i64(3),
                i64(3),
                i32(3, 8),
                100,
                16,
                x(50, 256),
                x(256),
                x(3, 512),
                None,
                1e-6,
            ),
            {},
        ),
    ),
    _pair(256, 256),
    _pair(64, 128),
    *[_draw(*ways) for ways in product((False, True), repeat=3)],
    Call("take_rows", lambda x: ((x(9, 64), i64(3), x(3, 64)), {})),
    Call(
        "load_round",
        lambda x: (
            (
                RoundTensors(*ROUND, x(8, 64), i32(2, 3)),
                RoundTensors(i64(2, 4), i32(2), i64(2), x(8, 64), i32(2, 3)),
            ),
            {},
        ),
    ),
    Call("advance", lambda x: ((i32(2), i64(2), i64(2), i64(1), i32(2, 3), 64, 16), {})),
    *[_verify(acceptance) for acceptance in ACCEPTANCES],
    _begin(RowPlan(4, 64, 16, slots_of_rejected=True), GIVEN, *STEPS),
    _begin(RowPlan(4, 64, 16, slots_of_rejected=True, later_rows=3), GIVEN, *STEPS, "rows_without_block"),
    *[
        _begin(RowPlan(1 + k, 64, 16), RowInputs(i64(2), i32(2, 3), token_ids=i64(2, 1), draft_token_ids=i64(2, k)))
        for k in (0, 3)
    ],
    _begin(RowPlan(6, 64, 16, later_rows=2, filler=1), GIVEN, "hidden_rows", "last_rows", "rows_without_block"),
    _begin(
        RowPlan(4, 64, 16, after_sampled=True, later_rows=4, filler=1),
        GIVEN,
        "context_positions",
        "context_slots",
        "rows_without_block",
    ),
    _begin(RowPlan(512, 64, 16), RowInputs(i64(2), i32(2, 3), i64(2)), "last_rows"),
    _begin(
        RowPlan(4, 64, 16, tree_steps=3),
        RowInputs(i64(2), i32(2, 3), token_ids=i64(2, 1), draft_token_ids=i64(2, 3), draft_parents=i64(2, 3)),
        "ancestors",
    ),
    _begin(RowPlan(6, 64, 16, past=2), GIVEN, *STEPS, "rows_without_block", modules=True),
    Call("next_verify", lambda x: ((i64(2, 4), i32(2), i64(2, 3), i64(2), i64(2), i64(2, 3)), {})),
    Call("keep_rows", lambda x: ((i64(12), x(12, 64), i64(12), i64(12), _kept(x), 16), {})),
    Call("shift_token_ids", lambda x: ((i64(12), i64(2), i64(2), i32(2), i64(1)), {})),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.op)
def test_it_compiles(ops: TritonOps, call: Call, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = call.make(lambda *shape: torch.zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of CPU tensors' device
    parameters = getattr(declared, call.op).parameters
    flat, named = parameters.flatten(args, kwargs)
    on_its_device(call.op, parameters.with_records(getattr(ops, call.op)))(*flat, **named)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rows", [3, 33, 200])
@pytest.mark.parametrize("op", ["norm_linear", "norm_gate_up", "pair_linear"])
def test_it_compiles_over_fp8(ops: TritonOps, op: str, rows: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ops.options.float8:
        pytest.skip("this GPU has no conversion from e4m3")
    x = torch.zeros(rows, 256, dtype=torch.bfloat16)
    weight, scale = torch.zeros(512, 256).to(torch.float8_e4m3fn), torch.ones(groups, 512)
    first = (i64(rows), x, PairInput(x, None, None, 1e-6)) if op == "pair_linear" else (x, None)
    weight = torch.cat([weight.view(torch.uint8)] * 2, 1).view(weight.dtype) if op == "pair_linear" else weight
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    on_its_device(op, getattr(ops, op))(*first, Weight(weight, None, scale))


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("kind", ["stores", "attends"])
def test_it_compiles_over_fp8_caches(ops: TritonOps, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ops.options.float8:
        pytest.skip("this GPU has no conversion from e4m3")

    def make(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float8_e4m3fn if shape[:2] == (6, 16) else torch.bfloat16)

    args, kwargs = _attend(rows, kind).make(make)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    on_its_device("paged_attention", ops.paged_attention)(*args, **kwargs)


def test_every_op_is_tried() -> None:
    assert {call.op for call in CALLS} == {name for name in dir(TritonOps) if name in declared.__all__}


def test_loops_of_linears_have_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tile that x fills in part too: a mask took a select per copy, and up to 32 % more time on an H200."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):
        pytest.skip("launch_pdl needs Triton 3.4")
    selects, run = dict[str, list[int]](), JITFunction.run

    def compiled(kernel: Any, *args: Any, **kwargs: Any) -> None:
        ptx = run(kernel, *args, **{**kwargs, "warmup": True}).asm["ptx"]
        loops = [body for _, body in re.findall(r"(\$L__BB\d+_\d+):.*?\n(.*?)bra\S*\s+\1;", ptx, re.S)]
        copying = [len(re.findall(r"\bselp\b", body)) for body in loops if "cp.async.cg" in body]
        selects.setdefault(kernel.__name__, []).extend(copying)

    monkeypatch.setattr(JITFunction, "run", compiled)
    driver.set_active(Driver(90))
    ops, weight = TritonOps(HOPPER[1]), torch.zeros(4096, 4096, dtype=torch.bfloat16)
    for count in (6, 16):
        x = torch.zeros(count, 4096, dtype=torch.bfloat16)
        ops.norm_linear(x, None, Weight(weight))
        ops.norm_gate_up(x, None, Weight(weight))
        ops.draft_from_hidden(x, Head(None, 1e-6, weight), Drafts(i64(count, 4), None, i64(1), i64(count)))
        ops.norm_linear(x, None, Weight(weight.to(torch.float8_e4m3fn), None, torch.ones(1, 4096)))
    with contextlib.suppress(RuntimeError):
        driver.reset_active()
    loops = {name: counts for name, counts in selects.items() if counts}
    assert loops.keys() == {"linear_kernel", "gate_up_kernel", "head_kernel", "linear_fp8_kernel"}
    assert all(partly <= whole for partly, whole in loops.values()), loops


def test_a_gpu_with_99_kib_of_shared_memory_has_tiles_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """GeForce and RTX, A10, L4, L40S: a tile tuned on an H200 takes up to 144 KiB there, and its launch fails."""
    most, run, made = dict[str, int](), JITFunction.run, list[LaunchOptions]()

    def compiled(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        binary = run(kernel, *args, **{**kwargs, "warmup": True})
        most[kernel.__name__] = max(most.get(kernel.__name__, 0), binary.metadata.shared)
        return binary

    monkeypatch.setattr(JITFunction, "run", compiled)
    found = SimpleNamespace(
        name="an L40S", major=8, minor=9, multi_processor_count=142, shared_memory_per_block_optin=99 << 10
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(specgraph_cuda.kernels, "register", lambda key, options, around: made.append(options))
    specgraph_cuda.kernels.register_kernels(torch.device("cuda", 0))
    ops, weight = TritonOps(made[0]), torch.zeros(8192, 4096, dtype=torch.bfloat16)
    driver.set_active(Driver(89))
    for rows in (8, 32, 64):
        x = torch.zeros(rows, 4096, dtype=torch.bfloat16)
        ops.norm_linear(x, None, Weight(weight))
        ops.norm_gate_up(x, None, Weight(weight))
        ops.draft_from_hidden(x, Head(None, 1e-6, weight), Drafts(i64(rows, 4), None, i64(1), i64(rows)))
        for op in (ops.norm_linear, ops.norm_gate_up):
            op(x, None, Weight(weight.to(torch.float8_e4m3fn), None, torch.ones(1, 8192)))
    with contextlib.suppress(RuntimeError):
        driver.reset_active()
    assert {"linear_kernel", "gate_up_kernel", "head_kernel", "linear_fp8_kernel", "gate_up_fp8_kernel"} <= most.keys()
    assert max(most.values()) <= 99 << 10, most
