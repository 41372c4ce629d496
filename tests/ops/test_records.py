"""Named tuples as parameters of ops: torch's signature, calls with records, and calls that torch makes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specgraph.ops.records import Parameters


class Rows(NamedTuple):
    ids: Tensor
    lengths: Tensor | None


class Draws(NamedTuple):
    temperature: Tensor
    seed: int


def example(rows: Rows, scale: float, draws: Draws | None = None, bias: Tensor | None = None, *, size: int) -> None: ...


ONE, TWO, THREE = (torch.zeros(n) for n in (1, 2, 3))


def test_torch_gets_one_argument_per_field():
    parameters = Parameters(example, ["rows.ids", "bias"])
    schema = torch.library.infer_schema(
        parameters.with_records(example), mutates_args=parameters.written, op_name="example"
    )
    assert schema == (
        "example(Tensor(a0!) rows_ids, Tensor? rows_lengths, float scale, Tensor? draws_temperature=None, "
        "SymInt? draws_seed=None, Tensor(a5!)? bias=None, *, SymInt size) -> ()"
    )
    assert Parameters(example, ["rows"]).written == ("rows_ids", "rows_lengths")


@pytest.mark.parametrize(
    ("args", "kwargs", "seen"),
    [
        ((Rows(ONE, TWO), 0.5), {"size": 3}, (Rows(ONE, TWO), 0.5)),
        ((Rows(ONE, None), 0.5, Draws(TWO, 7), THREE), {"size": 3}, (Rows(ONE, None), 0.5, Draws(TWO, 7), THREE)),
        ((Rows(ONE, None), 0.5, None, THREE), {"size": 3}, (Rows(ONE, None), 0.5, None, THREE)),
    ],
)
def test_an_implementation_gets_the_records_of_the_call(args, kwargs, seen):
    got = []
    parameters = Parameters(example)
    flat, named = parameters.flatten(args, kwargs)
    parameters.with_records(lambda *args, **kwargs: got.append((args, kwargs)))(*flat, **named)
    assert [(tuple(map(type, args)), args, kwargs) for args, kwargs in got] == [(tuple(map(type, seen)), seen, kwargs)]


def test_a_record_may_be_given_by_name_and_torch_may_leave_out_defaults():
    parameters = Parameters(example)
    flat, named = parameters.flatten((Rows(ONE, TWO), 0.5), {"draws": Draws(ONE, 1), "size": 2})
    assert (flat, named) == ([ONE, TWO, 0.5], {"draws_temperature": ONE, "draws_seed": 1, "size": 2})
    got = []
    parameters.with_records(lambda *args, **kwargs: got.append(args))(ONE, TWO, 0.5, ONE, size=2)
    assert got == [(Rows(ONE, TWO), 0.5, Draws(ONE, None))]


def test_a_record_by_keyword_alone_is_refused():
    def wrong(x: Tensor, *, rows: Rows) -> None: ...

    with pytest.raises(TypeError, match="'rows' must be a positional parameter"):
        Parameters(wrong)
