"""Rows of the states of gated delta nets, against float64 states that run the accepted rows alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from specgraph_models import ops as model_ops
from specgraph_models.delta import DeltaConfig
from specgraph_models.ops.delta import DeltaState, DeltaWeights, StateRows
from torch import Generator, Tensor

from specgraph_conformance.linear_oracles import TOLERANCE, normal
from specgraph_conformance.op_table import FLOATS, Run, Table
from specgraph_conformance.rig import expect_close, expect_equal
from specgraph_conformance.state_oracles import DenseState

TABLE = Table()
SLOTS, MOST = 4, 4
"""Slots with the null slot, and the most rows of a verify."""
SIZES = {
    "two-values-per-key": DeltaConfig(key_heads=2, value_heads=4, key_size=16, value_size=16, kernel=4),
    "three-values-per-key": DeltaConfig(key_heads=1, value_heads=3, key_size=16, value_size=32, kernel=2),
}


class _Net(NamedTuple):
    weights: DeltaWeights
    state: DeltaState
    covered: Tensor
    slot_of_block: Tensor


def _net(g: Generator, dtype: torch.dtype, sizes: DeltaConfig) -> _Net:
    """Return weights and states. Every slot holds numbers that its last owner left."""
    heads = sizes.value_heads
    weights = DeltaWeights(
        normal(g, (sizes.channels, sizes.kernel), dtype, 0.6), -torch.rand(heads, generator=g), torch.randn(heads)
    )
    ring = SLOTS, 2 * MOST
    state = DeltaState(
        torch.randn(SLOTS, heads, sizes.key_size, sizes.value_size, generator=g),
        torch.randn(*ring, sizes.key_heads, sizes.key_size, generator=g),
        torch.randn(*ring, heads, sizes.value_size, generator=g),
        -torch.rand(*ring, heads, generator=g),
        normal(g, (SLOTS, sizes.kernel - 1 + MOST, sizes.channels), dtype),
    )
    return _Net(weights, state, torch.tensor([0, 9, 9, 9]), torch.tensor([0, 0, 2, 0, 1, 3]))


def _pass(
    run: Run, net: _Net, mixed: Tensor, gates: Tensor, starts: list[int], counts: list[int] | None, table: Tensor
) -> Tensor:
    """Run one pass as a target does: place the rows, then run the layer. Counts are those of a prompt."""
    rows, commits = mixed.shape[0] // len(starts), counts is not None
    found = run(
        model_ops.find_states, torch.tensor(starts), None if counts is None else torch.tensor(counts), table,
        net.slot_of_block, net.covered, rows, MOST, commits, written=[net.covered],
    )  # fmt: skip
    return run(
        model_ops.gated_delta_rule, mixed, gates, net.weights, net.state, StateRows(*found), commits,
        written=list(net.state),
    )  # fmt: skip


@TABLE.row(
    "gated-delta-rule",
    "Outputs of a gated delta net are those of float64 states that run the accepted rows alone: of prompts in padded "
    "chunks and of verifies with any number of rows, where every slot was left dirty; other slots keep their bits.",
    hazard="state-formula",
    cause="gated_delta_rule: the decay after the correction, the output before the update, keys or values of another "
    "head, a ring that depends on the pass, padding rows that count, or the null slot's state",
    timeout=120,
    dtype=FLOATS,
    sizes=SIZES,
)
def gated_delta_rule(run: Run, g: Generator, dtype: torch.dtype, sizes: DeltaConfig) -> None:
    net = _net(g, dtype, sizes)
    null = [tensor[0].clone() for tensor in net.state]
    # Requests of blocks 4, 2 and 5, which have slots 1, 2 and 3. The last one is inert in every verify.
    tables = [torch.tensor([[block, 1]], dtype=torch.int32) for block in (4, 2, 5)]
    dense, at = [DenseState(sizes) for _ in tables], [0, 0, 0]

    def inputs(rows: int) -> tuple[Tensor, Tensor]:
        wide = normal(g, (rows, sizes.channels + 2 * sizes.value_heads), dtype)
        return wide[:, : sizes.channels], wide[:, sizes.channels :]  # parts of one projection

    def compare(seen: Tensor, wanted: Tensor, what: str) -> None:
        expect_close(seen, wanted, TOLERANCE[dtype], what)

    for request, lengths in enumerate([[1], [5, 6], [MOST]]):
        for length in lengths:
            mixed, gates = inputs(6)
            seen = _pass(run, net, mixed, gates, [at[request]], [length], tables[request])
            compare(seen[:length], dense[request].run(mixed[:length], gates[:length], net.weights), "a prompt's rows")
            assert not seen[length:].any(), "padding rows have outputs"
            at[request] += length
    untouched = [tensor[3].clone() for tensor in net.state]
    for rows, accepted in ((MOST, (1, 3)), (2, (2, 1)), (1, (1, 1)), (MOST, (MOST, 2)), (3, (1, 3))):
        mixed, gates = inputs(3 * rows)
        seen = _pass(run, net, mixed, gates, [at[0], at[1], -1], None, torch.cat(tables))
        assert not seen[2 * rows :].any(), "rows of an inert request have outputs"
        for request, count in enumerate(accepted):
            own = slice(request * rows, request * rows + count)  # rejected rows: they would change the float64 state
            wanted = dense[request].run(mixed[own], gates[own], net.weights)
            compare(seen[own], wanted, f"request {request} from position {at[request]}")
            at[request] += count
    for tensor, before, own in zip(net.state, null, untouched, strict=True):
        expect_equal(tensor[0], before, "the null slot's state")
        expect_equal(tensor[3], own, "the state of an inert request")


@TABLE.row(
    "gated-delta-folds-are-exact",
    "Records that are folded give the bits of the state that the rows themselves would have left, and a pass that runs "
    "again gives the same bits.",
    hazard="state-fold-inexact",
    cause="gated_delta_rule: records in fewer bits, sums in another order, or a product and a sum that are rounded "
    "together in the fold but not in the step",
)
def folds(run: Run, g: Generator) -> None:
    sizes = SIZES["two-values-per-key"]
    net = _net(g, torch.float32, sizes)
    state = DeltaState(*(tensor.clone() for tensor in net.state))
    other = net._replace(state=state, covered=net.covered.clone())
    table, (mixed, gates) = torch.tensor([[4]], dtype=torch.int32), (
        normal(g, (12, sizes.channels)), normal(g, (12, 2 * sizes.value_heads))
    )  # fmt: skip
    for each in (net, other):
        _pass(run, each, mixed[:1], gates[:1], [0], [1], table)
    for place in range(1, 8):  # one row per pass
        _pass(run, net, mixed[place : place + 1], gates[place : place + 1], [place], None, table)
    outs = [_pass(run, other, mixed[1:5], gates[1:5], [1], None, table) for _ in range(2)]
    expect_equal(outs[0], outs[1], "outputs of a pass that runs again")
    for start in (4, 5):  # three rows were accepted, then one
        _pass(run, other, mixed[start : start + 3], gates[start : start + 3], [start], None, table)
    for each in (net, other):
        _pass(run, each, mixed[8:9], gates[8:9], [8], None, table)
    expect_equal(other.state.state[1], net.state.state[1], "states after the same rows in other passes")


@TABLE.row(
    "gated-norm",
    "The norm of a gated delta net's heads is rms_norm(x) * weight * silu(gate) in float64, with one weight for all "
    "heads and nothing added to it.",
    hazard="state-formula",
    cause="gated_norm: 1 + weight, the gate before the norm, or a weight per head",
    dtype=FLOATS,
)
def gated_norm(run: Run, g: Generator, dtype: torch.dtype) -> None:
    x, gate = normal(g, (5, 3, 32), dtype), normal(g, (5, 100), dtype)[:, :96]
    weight, eps = 1 + 0.3 * torch.randn(32, generator=g), 0.04
    wide, open_ = x.double(), gate.double()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    seen = run(model_ops.gated_norm, x, gate, weight, eps)
    expect_close(seen, wanted.flatten(1) * open_ * torch.sigmoid(open_), TOLERANCE[dtype], "the norm")
