"""The rows of the op table over the Triton kernels in Triton's interpreter (TRITON_INTERPRET=1), without a GPU. With
one, the suite runs them on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import INTERPRETED
from interpreted import ops as kernels
from specgraph_conformance.op_rows import blocks, context_parallel, ngram, passes, rounds, states
from specgraph_conformance.op_run import run_on
from specgraph_conformance.op_table import Row
from specgraph_plugin.kernels import verified_rounds
from torch.utils._python_dispatch import TorchDispatchMode

from specgraph.cpu import CpuPlatform
from specgraph.kernels.trial import agrees_with_reference
from specgraph.ops.library import NAMESPACE, declared

SETS = [
    pytest.param(row, parameters, id=f"{row.case.id}[{id}]")
    for table in (context_parallel, passes, rounds, ngram, states, blocks)
    for row in table.TABLE.rows
    for id, parameters in row.parameter_sets()
    if not (table in (context_parallel, states, blocks) and "bf16" in id)  # the interpreter has no bfloat16 arithmetic
]


class Interpreted(TorchDispatchMode):
    """Runs the kernels of the ops that have one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__.partition(".")[0], kwargs or {}
        result = NotImplemented
        if func.namespace == NAMESPACE and hasattr(kernels(), name):
            result = declared()[name].parameters.with_records(getattr(kernels(), name))(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(("row", "parameters"), SETS)
def test_kernels(row: Row, parameters: dict[str, Any]) -> None:
    with torch.no_grad(), Interpreted():
        row.check(run_on(CpuPlatform()), torch.Generator().manual_seed(0), **parameters)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1; on a GPU a plugin's start-up runs it")
def test_the_hand_over_of_a_verify() -> None:
    assert agrees_with_reference(kernels(), verified_rounds, torch.device("cpu")) is None
