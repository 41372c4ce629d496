"""The rows of the op table, on the device under test: a test function for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specgraph.device import Platform

from specgraph_conformance.case import MARKER
from specgraph_conformance.op_rows import ROWS
from specgraph_conformance.op_run import RunInGraph
from specgraph_conformance.op_table import Row


def case_of(row: Row) -> Callable[..., None]:
    """The test function of a row, once per set of its parameters. A failure begins with where to look first."""

    def test(platform: Platform, seed: int, parameters: dict[str, Any]) -> None:
        run = RunInGraph(platform)
        try:
            row.check(run, torch.Generator().manual_seed(seed), **parameters)
        except AssertionError as error:
            place = run.differs or "at once as in a replay: look at the op, not at the graph"
            error.args = (f"{error} ({place})",)
            raise
        assert not run.differs, run.differs

    def test_only_set(platform: Platform, seed: int) -> None:
        test(platform, seed, {})

    sets = [pytest.param(parameters, id=id) for id, parameters in row.parameter_sets()]
    collected = pytest.mark.parametrize("parameters", sets)(test) if row.parameters else test_only_set
    return getattr(pytest.mark, MARKER)(row.case)(collected)


globals().update({f"test_{row.case.id}": case_of(row) for row in ROWS})
