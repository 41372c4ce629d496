"""The rows of the op table, on the device under test: a test function for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specgraph.device import Platform

from specgraph_conformance.case import MARKER
from specgraph_conformance.op_rows import ROWS
from specgraph_conformance.op_run import run_on
from specgraph_conformance.op_table import Row


def case_of(row: Row) -> Callable[..., None]:
    """The test function of a row, once per set of its parameters."""

    def test(platform: Platform, seed: int, way: str, parameters: dict[str, Any]) -> None:
        row.check(run_on(platform, way), torch.Generator().manual_seed(seed), **parameters)

    sets = [pytest.param(way, parameters, id=id) for id, way, parameters in row.parameter_sets()]
    return getattr(pytest.mark, MARKER)(row.case)(pytest.mark.parametrize(("way", "parameters"), sets)(test))


globals().update({f"test_{row.case.id}": case_of(row) for row in ROWS})
