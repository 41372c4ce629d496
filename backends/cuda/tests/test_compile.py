"""Every Triton op compiles, down to a binary, for a GPU that need not be there. Skipped where Triton is not installed.

The ops run on CPU tensors, and each launch is turned into a compilation. What the kernels compute is not looked at.
"""

# ruff: noqa: E402  (the tests are skipped before anything imports Triton)
from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

triton = pytest.importorskip("triton")

import specgraph_cuda.kernels
from launched import Launched
from specgraph_conformance.attention_rows import Rows
from specgraph_conformance.op_rows import ROWS
from specgraph_conformance.op_run import run_on
from specgraph_cuda.kernels import attention_for, on_its_device, overlap_previous, tile_for
from specgraph_models.kernels import model_ops
from specgraph_plugin.kernels import verified_rounds
from specgraph_run.decoder.kernels import sampled_verify
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specgraph.cpu import CpuPlatform
from specgraph.kernels.launch import LaunchOptions
from specgraph.kernels.trial import draft_round
from specgraph.ops import Drafts, LmHead, Weight
from specgraph.ops.library import NAMESPACE, declared


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


def compile_for(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this driver Triton's own for one test.

    `driver.reset_active()` would make the real driver while `torch.cuda.current_device` is replaced, and keep it.
    """
    kept = "_active" if "_active" in vars(driver) else "active"  # Triton 3.2 has the second
    monkeypatch.setattr(driver, kept, Driver(capability))


AMPERE = (80, LaunchOptions())
HOPPER = (
    90,
    LaunchOptions(
        overlap=overlap_previous, extra={"launch_pdl": True}, tile=tile_for, attention=attention_for, float8=True
    ),
)


FLOAT8 = (90, LaunchOptions(float8=True))
"""Hopper without what needs Triton 3.4."""


@pytest.fixture(params=[AMPERE, FLOAT8, HOPPER], ids=["sm_80", "sm_90", "sm_90-overlap"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Launched:
    capability, options = request.param
    is_old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4)
    if options.overlap and is_old:
        pytest.skip("launch_pdl needs Triton 3.4")
    if request.param is FLOAT8 and not is_old:
        pytest.skip("sm_90-overlap has the same kernels")
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: run(*args, **{**kwargs, "warmup": True}))
    compile_for(capability, monkeypatch)
    return Launched(options)


def i64(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


class Compiled(TorchDispatchMode):
    """Compiles the kernels of each op that is called, and computes its results by the plain torch reference."""

    def __init__(self, kernels: Launched) -> None:
        super().__init__()
        self.kernels, self.called = kernels, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__.partition(".")[0], kwargs or {}
        if func.namespace == NAMESPACE and hasattr(self.kernels, name):
            op = declared()[name]
            kernel = op.parameters.with_records(on_its_device(op, getattr(self.kernels, name)))
            copies = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
            if kernel(*copies[0], **copies[1]) is not NotImplemented:
                self.called.add(name)
        return func(*args, **kwargs)


@pytest.fixture
def compiled(ops: Launched, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of CPU tensors' device
    with torch.no_grad(), Compiled(ops) as mode:
        yield mode


def test_every_op_compiles(compiled: Compiled) -> None:
    """Compile what the rows of the op table and the trials of a device call, in their dtypes and sizes."""
    for calls in (draft_round, model_ops, sampled_verify, verified_rounds):
        for name, arguments in calls():
            declared()[name](**arguments)
    for row in ROWS:
        if compiled.kernels.options.float8 or "float8" not in row.case.needs:
            for _, parameters in row.parameter_sets():
                row.check(run_on(CpuPlatform()), torch.Generator().manual_seed(0), **parameters)
    assert compiled.called == {name for name in declared() if hasattr(compiled.kernels, name)}


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("dim", [16, 96, 128, 256])
def test_attention_compiles_for_every_head_dim(compiled: Compiled, dim: int, rows: int) -> None:
    asked = Rows(torch.Generator().manual_seed(dim), [rows, rows], [9, 40], dim=dim, dtype=torch.bfloat16)
    asked.check(run_on(CpuPlatform()))
    assert compiled.called == {"paged_attention"}


def test_loops_of_linears_have_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask took a select per copy, and up to 32 % more time on an H200, also where x fills a tile in part."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):
        pytest.skip("launch_pdl needs Triton 3.4")
    selects, run = dict[str, list[int]](), JITFunction.run

    def compiled(kernel: Any, *args: Any, **kwargs: Any) -> None:
        ptx = run(kernel, *args, **{**kwargs, "warmup": True}).asm["ptx"]
        loops = [body for _, body in re.findall(r"(\$L__BB\d+_\d+):.*?\n(.*?)bra\S*\s+\1;", ptx, re.S)]
        copying = [len(re.findall(r"\bselp\b", body)) for body in loops if "cp.async.cg" in body]
        selects.setdefault(kernel.__name__, []).extend(copying)

    monkeypatch.setattr(JITFunction, "run", compiled)
    compile_for(90, monkeypatch)
    ops, weight = Launched(HOPPER[1]), torch.zeros(4096, 4096, dtype=torch.bfloat16)
    for count in (6, 16):
        x = torch.zeros(count, 4096, dtype=torch.bfloat16)
        ops.norm_linear(x, None, Weight(weight))
        ops.norm_gate_up(x, None, Weight(weight))
        ops.draft_from_hidden(x, LmHead(None, 1e-6, weight), Drafts(i64(count, 4), None, i64(1), i64(count)))
        ops.norm_linear(x, None, Weight(weight.to(torch.float8_e4m3fn), None, torch.ones(1, 4096)))
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
    ops, weight = Launched(made[0]), torch.zeros(8192, 4096, dtype=torch.bfloat16)
    compile_for(89, monkeypatch)
    for rows in (8, 32, 64):
        x = torch.zeros(rows, 4096, dtype=torch.bfloat16)
        ops.norm_linear(x, None, Weight(weight))
        ops.norm_gate_up(x, None, Weight(weight))
        ops.draft_from_hidden(x, LmHead(None, 1e-6, weight), Drafts(i64(rows, 4), None, i64(1), i64(rows)))
        for op in (ops.norm_linear, ops.norm_gate_up):
            op(x, None, Weight(weight.to(torch.float8_e4m3fn), None, torch.ones(1, 8192)))
    assert {"linear_kernel", "gate_up_kernel", "head_kernel", "linear_fp8_kernel", "gate_up_fp8_kernel"} <= most.keys()
    assert max(most.values()) <= 99 << 10, most
