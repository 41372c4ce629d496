"""Kernels compiled ahead, in other processes, are those that launches then look up. No GPU is needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.4")  # launch_pdl

import triton
from launched import Launched
from specgraph_models import ops as model_ops
from test_compile import HOPPER, Compiled, compile_for, i64
from torch import Tensor
from triton import language as tl
from triton.runtime.jit import JITFunction

from specgraph import ops as declared
from specgraph.kernels.ahead import compilations
from specgraph.kernels.compilation import Compilation, compile_all, digest
from specgraph.ops import Drafts, LmHead, Norm, Weight


def body() -> None:
    """Linears of 6 rows and drafts, between torch's own ops."""
    x, weight = torch.ones(6, 512, dtype=torch.bfloat16), torch.ones(512, 512, dtype=torch.bfloat16)
    x = declared.norm_linear(x, Norm(weight[0], 1e-6), Weight(weight)) + x
    gated = model_ops.norm_gate_up(x, None, Weight(weight))
    drafts = Drafts(i64(6, 4), None, i64(1), i64(6))
    declared.draft_from_hidden(torch.cat((gated, gated), 1), LmHead(None, 1e-6, weight), drafts)


def from_odd_addresses(norm_linear: Callable[..., Tensor]) -> None:
    """Triton compiles other code for rows that are not aligned."""
    rows, weight = torch.ones(6 * 512 + 1, dtype=torch.bfloat16), torch.ones(512, 512, dtype=torch.bfloat16)
    norm_linear(rows[1:].view(6, 512), None, Weight(torch.nn.functional.linear(weight, weight)))


def test_what_is_compiled_ahead_is_found_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    compile_for(90, monkeypatch)
    ops, seen = Launched(HOPPER[1]), list[tuple[int, int]]()
    work = compilations(ops.launchers, [body, body, lambda: from_odd_addresses(declared.norm_linear)])
    assert len(work) == 6
    compile_all(work, lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(1, 7)]
    compiled = sorted(tmp_path.rglob("*.cubin"))
    assert len(compiled) == 6

    run, launched = JITFunction.run, list[str]()

    def looked_up(kernel: JITFunction, *args: object, **kwargs: object) -> object:
        launched.append(kernel.__name__)
        return run(kernel, *args, **{**kwargs, "warmup": True})

    monkeypatch.setattr(JITFunction, "run", looked_up)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    with torch.no_grad():
        with Compiled(ops):
            body()
        from_odd_addresses(ops.norm_linear)
    assert len(launched) == 6
    assert sorted(tmp_path.rglob("*.cubin")) == compiled
    assert all(each.kept() is not None for each in work)


@triton.jit
def _theirs(x: tl.tensor) -> None:
    tl.store(x, 1.0)


def test_a_kernel_of_somebody_else_s_is_not_launched_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for(90, monkeypatch)
    refused = list[str]()

    def attention() -> None:
        x = torch.ones(6, 512, dtype=torch.bfloat16)
        try:
            _theirs[(1,)](x)
        except RuntimeError as error:
            refused.append(str(error))
            raise

    work = compilations(Launched(HOPPER[1]).launchers, [attention, body])
    assert refused == ["a kernel that is none of our ops asks for an address"]
    assert work == compilations(Launched(HOPPER[1]).launchers, [body])


def test_a_process_that_dies_takes_one_kernel_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    fatal = Compilation(digest("fatal"), partial(os._exit, 1))
    others = [Compilation(digest(i), partial(bytes, i)) for i in range(8)]
    seen = list[tuple[int, int]]()
    compile_all([fatal, *others], lambda done, total: seen.append((done, total)))
    assert [each.kept() for each in others] == [bytes(i) for i in range(8)]
    assert fatal.kept() is None
    assert seen == [(done, 9) for done in range(1, 10)]


def test_without_a_cache_folder_kernels_are_compiled_where_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    work = Compilation(digest("key"), partial(bytes, 3))
    compile_all([work])
    assert work.result() == bytes(3)


def test_each_call_finds_the_kernels_of_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from specgraph_cuda import hopper, kernels
    from specgraph_cuda.many_rows import linears

    calls = list[list[Compilation]]()
    compile_for(90, monkeypatch)
    monkeypatch.setattr(hopper, "checked", lambda version: (13, 0))
    monkeypatch.setattr(hopper.nvrtc, "nvrtcVersion", lambda: None)
    monkeypatch.setattr(
        kernels, "launchers_of", lambda key: Launched(replace(HOPPER[1], many_rows=linears())).launchers
    )
    monkeypatch.setattr(kernels, "compile_all", lambda work, progress: calls.append(work))

    def given(size: int) -> Tensor:
        return torch.empty(size, 4096, dtype=torch.bfloat16, device="meta")

    def few() -> None:
        declared.norm_linear(given(4), None, Weight(given(6144)))

    def many() -> None:
        model_ops.norm_gate_up(given(96), None, Weight(given(24576)))

    for work in (few, few, many):
        kernels.compile_ahead([work], lambda done, total: None)
    names = [[each.compile.args[1] for each in found if each.compile.func is hopper.compiled] for found in calls]
    assert names == [["few_rows.cu"], ["few_rows.cu"], ["many_rows.cu"]]
