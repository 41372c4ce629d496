"""The rows of the op table on the plain torch references, whose schemas and fakes are checked on the way. A reference
that a row compares with is held to a host loop or to float64: `row_oracles.py`.

With the first and the last of a row's parameters: the suite runs them all on the cpu platform, whose ops are these
references but for the few that host memory has a faster implementation of.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from ops.row_oracles import ORACLES, Judged
from specgraph_conformance.op_rows import ROWS
from specgraph_conformance.op_table import Row
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from specgraph.ops.library import NAMESPACE, declared

SETS = [
    pytest.param(row, parameters, id=f"{row.case.id}[{id}]")
    for row in ROWS
    if not row.large
    for id, parameters in dict([*row.parameter_sets()][:: max(1, len([*row.parameter_sets()]) - 1)]).items()
]
REFERENCE = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse2)
"""A key that no device implements the ops for."""


class References(TorchDispatchMode):
    """Runs the references of the ops, also of those that host memory has a faster implementation of."""

    checked: ClassVar[set[str]] = set()
    """Calls whose schema and fake were checked, by op, dtypes and host values; of all rows, since it takes longest."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != NAMESPACE:
            return func(*args, **kwargs)
        kinds = [str(leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves((args, kwargs))]
        if (key := f"{func} {kinds}") not in self.checked:
            self.checked.add(key)
            copies = tree_map_only(torch.Tensor, _copy, (args, kwargs))
            opcheck(func, *copies, test_utils=("test_schema", "test_faketensor"))
        return func.redispatch(REFERENCE, *args, **kwargs)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """float8 values as float32: torch compares arguments by arithmetic, which it has not for float8."""
    return tensor.float() if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor.clone()


@pytest.mark.parametrize(("row", "parameters"), SETS)
def test_reference(row: Row, parameters: dict[str, Any]) -> None:
    with torch.no_grad(), References():
        row.check(Judged(), torch.Generator().manual_seed(0), **parameters)


def test_oracles_are_of_ops() -> None:
    assert ORACLES.keys() <= declared().keys()
