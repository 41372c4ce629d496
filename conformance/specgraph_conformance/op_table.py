"""The table of claims about ops. A row makes inputs for an op, runs it, and compares with an oracle on the host.

The suite runs each row on the device under test, eagerly and in a graph. The core's own tests run the rows on the plain
torch references.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_map

from specgraph_conformance.case import Case
from specgraph_conformance.rig import expect_close, expect_equal

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of the parameter `dtype`, by their part of the case's id."""


class Run(Protocol):
    """Runs an op, or a function that calls several ops, on a device. Arguments and results are in host memory."""

    def __call__(self, op: Callable[..., Any], *args: Any, written: Iterable[Tensor] = (), **kwargs: Any) -> Any:
        """Run `op` and return its results, in host memory.

        Args:
            op: a function of `specgraph.ops`, or one that calls several.
            args: tensors, numbers, and tuples, lists or dicts of them. Views keep their strides.
            written: the arguments that the op writes. They have their new values afterwards.

        Raises:
            AssertionError: the op wrote an argument that is not in `written`, or memory beside an argument.
        """
        ...


def expect_reference(
    run: Run,
    op: Any,
    *args: Any,
    written: Iterable[Tensor] = (),
    tolerance: float = 0.0,
    compare: Callable[[Tensor, Tensor, str], None] | None = None,
    rare: int = 0,
    **kwargs: Any,
) -> Any:
    """Run an op, and check that it returns and writes what its reference does, which is plain torch on the host.

    `tests/ops/row_oracles.py` holds the references to host loops and to float64, on the inputs of the same rows.

    Args:
        tolerance: of floating values, absolute plus relative. The reference then runs in float64. 0: all bits count.
        compare: compares floating values instead, with those of the reference in float64.
        rare: the number of integers per tensor that may differ, where rounding may decide about so many.

    Returns:
        The op's results.
    """
    written, parameters = list(written), inspect.signature(op.reference).bind(*args, **kwargs)

    def wide(leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        is_wide = leaf.is_floating_point() and leaf.itemsize > 1 and not any(leaf is each for each in written)
        return leaf.double() if is_wide else leaf.clone()

    is_exact = not tolerance and compare is None
    copies = deepcopy((args, kwargs)) if is_exact else tree_map(wide, (args, kwargs))
    wanted = op.reference(*copies[0], **copies[1])
    seen = run(op, *args, written=written, **kwargs)
    of_copies = inspect.signature(op.reference).bind(*copies[0], **copies[1]).arguments
    both = [
        {**arguments, "result": result} for arguments, result in ((parameters.arguments, seen), (of_copies, wanted))
    ]
    leaves = (tree_flatten_with_path(each)[0] for each in both)
    for (path, mine), (_, right) in zip(*leaves, strict=True):
        name = ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path)
        if not torch.is_tensor(mine):
            continue
        if is_exact or not mine.is_floating_point():
            if not rare or mine.shape != right.shape or int((mine != right).sum()) > rare:
                expect_equal(mine, right, name)
        elif not name.startswith("result") and not any(mine is each for each in written):
            continue
        elif compare is not None:
            compare(mine, right.double(), name)
        else:
            expect_close(mine, right.double(), tolerance, name)
    return seen


Check = Callable[..., None]
"""`check(run, g, **parameters)` checks one row. It draws its inputs from the generator `g`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One claim about ops.

    Attributes:
        case: the claim, and the place to look at first if it does not hold.
        check: raises AssertionError if the claim does not hold.
        parameters: by name, the values that the claim is checked for, each with its part of the case's id.
        large: the sizes are chosen for a device's own kernels. References have no such kernels.
    """

    case: Case
    check: Check
    parameters: Mapping[str, Mapping[str, Any]]
    large: bool = False

    def parameter_sets(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the id and the values of each parameter set. A row without parameters yields one empty id and set."""
        for chosen in product(*(values.items() for values in self.parameters.values())):
            yield (
                "-".join(id for id, _ in chosen),
                {name: value for name, (_, value) in zip(self.parameters, chosen, strict=True)},
            )


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one family of ops, in the order in which the suite runs them."""

    rows: list[Row] = field(default_factory=list[Row])

    def row(
        self,
        id: str,
        property: str,
        *,
        cause: str,
        hazard: str | None = None,
        needs: tuple[str, ...] = (),
        quick: bool = False,
        timeout: float = 60.0,
        large: bool = False,
        **parameters: Sequence[Any] | Mapping[str, Any],
    ) -> Callable[[Check], Check]:
        """Add the decorated check as a row. The arguments are the fields of `Case` and `Row`.

        Args:
            parameters: the values of each, as a sequence, or as a mapping from their part of the id.
        """
        named = {
            name: values if isinstance(values, Mapping) else {str(value): value for value in values}
            for name, values in parameters.items()
        }

        def add(check: Check) -> Check:
            declared = Case(f"kernels.{id}", property, cause, hazard, needs, (), quick, timeout)
            self.rows.append(Row(declared, check, named, large))
            return check

        return add
