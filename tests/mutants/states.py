"""Bugs of targets with recurrent states: rolled back to the wrong row, not reset, advanced by padding, or shared."""

from __future__ import annotations

from typing import Any

import torch
from mutants.registry import mutant
from torch import Tensor

FIND, RULE, NORM = (f"specgraph_models.ops:{name}" for name in ("find_states", "gated_delta_rule", "gated_norm"))
DELTA = "specgraph_models.ops.delta"


@mutant("state-rolled-back-wrong", FIND)
def last_row(real: Any, *given: Any) -> Any:
    """The state behind the last row of a verify goes on, whatever was accepted."""
    start, count, slot, pending = real(*given)
    return start, count, slot, torch.where(pending > 0, given[6], pending)


@mutant("state-rolled-back-wrong-window", f"{DELTA}:_convolved")
def window_not_rolled_back(real: Any, mixed: Any, weight: Any, state: Any, at: Any) -> Any:
    """The state is rolled back, the convolution's window is not."""
    return real(mixed, weight, state, at._replace(start=torch.where(at.start > 0, at.start + 1, at.start)))


@mutant("state-rolled-back-wrong-prompt", RULE)
def prompt_as_verify(real: Any, mixed: Tensor, gates: Any, weights: Any, state: Any, at: Any, commits: bool) -> Any:
    """A prompt's chunk of K + 1 rows is taken for a verify: its rows become records, which nobody folds."""
    return real(mixed, gates, weights, state, at, commits and 2 * mixed.shape[0] != state.keys.shape[1])


@mutant("state-round-without-drafts", RULE)
def ring_of_the_pass(real: Any, mixed: Tensor, gates: Any, weights: Any, state: Any, at: Any, commits: bool) -> Any:
    """The ring of records has the size of the pass: rounds of other K find them elsewhere."""
    rows = 2 * mixed.shape[0] // at.start.shape[0]
    if not commits:
        state = state._replace(**{name: getattr(state, name)[:, :rows] for name in ("keys", "updates", "decays")})
    return real(mixed, gates, weights, state, at, commits)


@mutant("state-not-reset", RULE)
def stored_state(real: Any, mixed: Any, gates: Any, weights: Any, state: Any, at: Any, commits: bool) -> Any:
    """A prompt begins from what the slot's last owner left, state and window."""
    turns = state.keys.shape[1] * state.window.shape[1]  # the same places of the rings
    return real(mixed, gates, weights, state, at._replace(start=torch.where(at.start == 0, turns, at.start)), commits)


@mutant("state-advanced-by-padding", RULE)
def padded_requests(real: Any, mixed: Tensor, gates: Any, weights: Any, state: Any, at: Any, commits: bool) -> Any:
    """Padded requests run through the null slot's state."""
    rows = mixed.shape[0] // at.start.shape[0]
    inert = at.start < 0
    at = at._replace(start=at.start.clamp(min=1), num_rows=torch.where(inert, rows, at.num_rows))
    return real(mixed, gates, weights, state, at, commits)


@mutant("state-rolled-back-wrong-padding", RULE)
def padded_rows(real: Any, mixed: Tensor, gates: Any, weights: Any, state: Any, at: Any, commits: bool) -> Any:
    """Padding rows of a prompt decay the state: their inputs are zeros, their gates are not."""
    rows = mixed.shape[0] // at.start.shape[0]
    return real(mixed, gates, weights, state, at._replace(num_rows=torch.where(at.start < 0, 0, rows)), commits)


@mutant("state-written-by-rejected-rows", RULE)
def committed(real: Any, mixed: Any, gates: Any, weights: Any, state: Any, at: Any, commits: bool) -> Any:
    """A verify keeps the state behind all of its rows."""
    return real(mixed, gates, weights, state, at, True)


@mutant("state-shared-by-two-requests", "specgraph_run.decoder.rounds:free_slot")
def one_slot(real: Any, taken: Any) -> int:
    """Every request takes the first slot."""
    return 1


@mutant("state-shared-by-two-requests-row", FIND)
def slot_of_the_row(real: Any, *given: Any) -> Any:
    """A request's slot is its row, which changes when rows are compacted."""
    start, count, slot, pending = real(*given)
    rows = torch.arange(1, start.shape[0] + 1, device=start.device)
    return start, count, torch.where(slot > 0, rows, slot), pending


@mutant("state-formula", f"{DELTA}:_step")
def decay_last(real: Any, state: Tensor, row: Any) -> Any:
    """The correction sees the state before its decay."""
    undone = state * (-row.decay).exp()[..., None, None]
    _, update, _ = real(undone, row)
    repeat = update.shape[-2] // row.key.shape[-2]
    keys, queries = (x.repeat_interleave(repeat, dim=-2)[..., None] for x in (row.key, row.query))
    now = state * row.decay.exp()[..., None, None] + keys * update[..., None, :]
    return now, update, (now * queries).sum(-2)


@mutant("state-formula-output", f"{DELTA}:_step")
def output_first(real: Any, state: Tensor, row: Any) -> Any:
    """The output is taken before the update."""
    now, update, _ = real(state, row)
    repeat = update.shape[-2] // row.key.shape[-2]
    before = state * row.decay.exp()[..., None, None]
    return now, update, (before * row.query.repeat_interleave(repeat, dim=-2)[..., None]).sum(-2)


@mutant("state-formula-tiled", f"{DELTA}:_contracted")
def tiled_heads(real: Any, state: Tensor, vector: Tensor) -> Tensor:
    """Value head h takes key head h mod the number of key heads."""
    repeat = state.shape[-3] // vector.shape[-2]
    return (state * torch.cat([vector] * repeat, dim=-2)[..., None]).sum(-2)


@mutant("state-formula-norm", NORM)
def one_added(real: Any, x: Any, gate: Any, weight: Tensor, eps: float) -> Any:
    """The gated norm multiplies by 1 + weight, as the model's other norms do."""
    return real(x, gate, weight + 1, eps)


@mutant("state-fold-inexact", RULE)
def records_in_half(real: Any, mixed: Any, gates: Any, weights: Any, state: Any, at: Any, commits: bool) -> Any:
    """Records are kept in bfloat16."""
    out = real(mixed, gates, weights, state, at, commits)
    state.updates.copy_(state.updates.bfloat16())
    return out
