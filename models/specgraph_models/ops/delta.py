"""The op of gated delta nets (arXiv:2412.06464): a convolution over the last rows, and a recurrent state per head.

A request's state is indexed by position, as keys and values are. The state of a slot covers the tokens before some
position. The *records* of later rows (key, update, decay) lie in rings at position mod their size, and so do the inputs
of the convolution. A pass first folds the records between the state and its own first position into the state, in
order; then it runs its own rows, and writes their records. So no pass reads a number of accepted tokens, a rejected row
is overwritten before anything reads it, and the same pass twice gives the same bits. ADR 12 has the arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.errors import SpecgraphError
from specgraph.ops.library import op

NULL_STATE = 0
"""The slot that no request has. No pass changes its state."""

L2_EPS = 1e-6
"""Added to the sum of squares of a query and of a key before they are divided by its root."""


class DeltaWeights(NamedTuple):
    """The weights of a layer's convolution and gates."""

    conv: Tensor
    """[C, kernel]: the factors of the last `kernel` rows on each channel, the row itself last."""
    decay: Tensor
    """float32 [HV]: -exp(A_log)."""
    dt_bias: Tensor
    """float32 [HV]"""


class DeltaState(NamedTuple):
    """The state of one layer: an entry per slot, of which a running request has one. Slot 0 is the null slot."""

    state: Tensor
    """float32 [slots, HV, DK, DV]"""
    keys: Tensor
    """float32 [slots, 2 * M, HK, DK]: the normalised keys of later rows. M is the most rows of a verify."""
    updates: Tensor
    """float32 [slots, 2 * M, HV, DV]"""
    decays: Tensor
    """float32 [slots, 2 * M, HV]: the logarithm of the factor on the state, at most 0."""
    window: Tensor
    """[slots, kernel - 1 + M, C]: the inputs of the convolution."""


class StateRows(NamedTuple):
    """The place of each request's rows in its state, int64 [R] each."""

    start: Tensor
    """The position of its first row. -1 if it is inert."""
    num_rows: Tensor
    """The number of its real rows. Padding follows them."""
    slot: Tensor
    """Its slot; the null slot if it is inert."""
    pending: Tensor
    """The number of records to fold first: those of the positions before `start` that the state does not cover."""


def _find_fake(
    start_positions: Tensor,
    counts: Tensor | None,
    block_table: Tensor,
    slot_of_block: Tensor,
    covered: Tensor,
    rows: int,
    most_pending: int,
    commits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    empty = [start_positions.new_empty(start_positions.shape) for _ in range(4)]
    return empty[0], empty[1], empty[2], empty[3]


def _find_on_host(
    start_positions: Tensor,
    counts: Tensor | None,
    block_table: Tensor,
    slot_of_block: Tensor,
    covered: Tensor,
    rows: int,
    most_pending: int,
    commits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    before = covered.clone()
    found = StateRows(
        *find_states.reference(
            start_positions, counts, block_table, slot_of_block, covered, rows, most_pending, commits
        )
    )
    behind = torch.where(found.start > 0, found.start - before[found.slot], 0)
    most = 0 if commits else most_pending
    if bool(((behind < 0) | (behind > most)).any()):
        raise SpecgraphError(
            f"a pass begins {behind.tolist()} positions after the ends of its requests' states; 0 to {most} are "
            "allowed: a row was not run, or the state is another request's; a bug of specgraph"
        )
    return found


@op(writes=["covered"], fake=_find_fake, host=_find_on_host)
def find_states(
    start_positions: Tensor,
    counts: Tensor | None,
    block_table: Tensor,
    slot_of_block: Tensor,
    covered: Tensor,
    rows: int,
    most_pending: int,
    commits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `StateRows` for a pass of `rows` rows per request, and move `covered` on.

    A request's slot follows from its first KV block. So it is right wherever the request's row is.

    Args:
        start_positions: int64 [R]: the position of each first row; a negative one makes a request inert.
        counts: int32 or int64 [R]: the number of real rows. None if all rows are real.
        block_table: int32 [R, max_blocks]
        slot_of_block: int64 [num_blocks]: the slot of the request whose first block it is, otherwise the null slot.
        covered: int64 [slots], written: the number of tokens that each slot's state will cover when the pass has run.
        most_pending: the most records that a pass may fold.
        commits: the states will cover the pass's own rows too (a prompt). Otherwise those become records (a verify).

    Returns:
        int64 [R] each.
    """
    slot = slot_of_block[block_table[:, 0].long()]
    counts = torch.full_like(start_positions, rows) if counts is None else counts.to(start_positions.dtype)
    live = (start_positions >= 0) & (counts > 0) & (slot != NULL_STATE)
    slot = torch.where(live, slot, NULL_STATE)
    start = torch.where(live, start_positions, -1)
    pending = torch.where(start > 0, start - covered[slot], 0).clamp(0, most_pending)
    reached = torch.where(live, start + counts if commits else start, 0)
    covered.index_put_((slot,), reached)  # inert requests all write 0 to the null slot
    return StateRows(start, torch.where(live, counts, 0), slot, pending)


class DeltaRows(NamedTuple):
    """The inputs of the recurrence for the rows of a pass, after the convolution."""

    query: Tensor
    """float32 [R, L, HK, DK], normalised and divided by the root of DK."""
    key: Tensor
    """float32 [R, L, HK, DK], normalised."""
    value: Tensor
    """float32 [R, L, HV, DV]"""
    decay: Tensor
    """float32 [R, L, HV]"""
    beta: Tensor
    """float32 [R, L, HV]"""


def _convolved(mixed: Tensor, weight: Tensor, state: DeltaState, at: StateRows) -> Tensor:
    """Return silu of the convolution over mixed [R, L, C], [R, L, C] in its dtype."""
    kernel, size = weight.shape[1], state.window.shape[1]
    before = at.start[:, None] + torch.arange(1 - kernel, 0, device=mixed.device)
    earlier = state.window[at.slot[:, None], before.clamp(min=0) % size]
    earlier = torch.where((before >= 0)[..., None], earlier, 0)
    wide, length = torch.promote_types(mixed.dtype, torch.float32), mixed.shape[1]
    inputs, weight = torch.cat((earlier, mixed), dim=1).to(wide), weight.to(wide)
    total = inputs[:, :length] * weight[:, 0]
    for tap in range(1, kernel):
        total = total + inputs[:, tap : tap + length] * weight[:, tap]
    return functional.silu(total.to(mixed.dtype))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def prepared(mixed: Tensor, gates: Tensor, weights: DeltaWeights, state: DeltaState, at: StateRows) -> DeltaRows:
    """Return the inputs of the recurrence. mixed [T, C] and gates [T, 2 * HV]: see `gated_delta_rule`."""
    requests, (_, heads, size_k, size_v) = at.start.shape[0], state.state.shape
    rows = _convolved(mixed.view(requests, -1, mixed.shape[1]), weights.conv, state, at).float()
    keys = state.keys.shape[2] * size_k
    query, key, value = rows.split((keys, keys, heads * size_v), dim=-1)
    query, key = (_unit(x.unflatten(-1, (-1, size_k))) for x in (query, key))
    b, a = gates.view(requests, -1, 2, heads).float().unbind(2)
    decay = weights.decay * functional.softplus(a + weights.dt_bias)
    return DeltaRows(query * size_k**-0.5, key, value.unflatten(-1, (heads, size_v)), decay, torch.sigmoid(b))


def _decayed(state: Tensor, decay: Tensor) -> Tensor:
    """Return state [..., HV, DK, DV] times exp(decay), [..., HV]."""
    return state * decay.exp()[..., None, None]


def _with_update(state: Tensor, key: Tensor, update: Tensor) -> Tensor:
    """Return state [..., HV, DK, DV] + key x update, of key [..., HK, DK] and update [..., HV, DV]."""
    repeat = update.shape[-2] // key.shape[-2]
    return state + key.repeat_interleave(repeat, dim=-2)[..., None] * update[..., None, :]


def _contracted(state: Tensor, vector: Tensor) -> Tensor:
    """Return the sum over DK of state [..., HV, DK, DV] times vector [..., HK, DK]: [..., HV, DV]."""
    repeat = state.shape[-3] // vector.shape[-2]
    return (state * vector.repeat_interleave(repeat, dim=-2)[..., None]).sum(-2)


def _step(state: Tensor, row: DeltaRows) -> tuple[Tensor, Tensor, Tensor]:
    """Run one row: decay, correction, output. Return the new state, the update and the output."""
    state = _decayed(state, row.decay)
    update = (row.value - _contracted(state, row.key)) * row.beta[..., None]
    state = _with_update(state, row.key, update)
    return state, update, _contracted(state, row.query)


def _row(rows: DeltaRows, *index: int | slice) -> DeltaRows:
    return DeltaRows(*(tensor[index] for tensor in rows))


def _on_host(
    mixed: Tensor, gates: Tensor, weights: DeltaWeights, state: DeltaState, at: StateRows, commits: bool
) -> Tensor:
    rows, ring, window = prepared(mixed, gates, weights, state, at), state.keys.shape[1], state.window.shape[1]
    out, inputs = torch.zeros_like(rows.value), mixed.view(at.start.shape[0], -1, mixed.shape[1])
    for request, (start, count, slot, pending) in enumerate(zip(*(each.tolist() for each in at), strict=True)):
        if start < 0:
            continue
        now = state.state[slot] if start else torch.zeros_like(state.state[slot])
        for position in range(start - pending, start):
            place = slot, position % ring
            now = _with_update(_decayed(now, state.decays[place]), state.keys[place], state.updates[place])
        if not commits:
            state.state[slot] = now
        for index in range(count):
            row = _row(rows, request, index)
            now, update, out[request, index] = _step(now, row)
            if not commits:
                place = slot, (start + index) % ring
                state.keys[place], state.updates[place], state.decays[place] = row.key, update, row.decay
            if index >= count - window:
                state.window[slot, (start + index) % window] = inputs[request, index]
        if commits:
            state.state[slot] = now
    return out.flatten(0, 1).to(mixed.dtype)


def _fake(
    mixed: Tensor, gates: Tensor, weights: DeltaWeights, state: DeltaState, at: StateRows, commits: bool
) -> Tensor:
    return mixed.new_empty(mixed.shape[0], state.state.shape[1], state.state.shape[3])


@op(writes=["state"], fake=_fake, host=_on_host)
def gated_delta_rule(
    mixed: Tensor, gates: Tensor, weights: DeltaWeights, state: DeltaState, at: StateRows, commits: bool
) -> Tensor:
    """Run the rows of R requests, L rows each, through a gated delta net.

    Per value head, with S the state [DK, DV]: S = S * exp(decay); update = (value - key S) * beta;
    S = S + key x update; output = query S. The four run in this order, each on the state that the one before it left.

    Args:
        mixed: [R * L, C]: the inputs of the convolution, channels of queries, keys and values.
        gates: [R * L, 2 * HV]: the logits of beta, then the inputs of the decay.
        state: written: the slots of live requests, and no other slot.
        at: the requests' places. Inert requests and padding rows change nothing.
        commits: keep the state after the rows, and no records of them (a prompt). Otherwise the state after the
            folded records is kept, and the rows become records (a verify).

    Returns:
        [R * L, HV, DV] in the dtype of mixed; zeros for inert requests and padding rows.
    """
    rows, ring, window = prepared(mixed, gates, weights, state, at), state.keys.shape[1], state.window.shape[1]
    slot, live = at.slot, at.start >= 0
    now = torch.where((at.start > 0)[:, None, None, None], state.state[slot], 0)
    for index in range(ring // 2):
        place = slot, (at.start - at.pending + index).clamp(min=0) % ring
        folded = _with_update(_decayed(now, state.decays[place]), state.keys[place], state.updates[place])
        now = torch.where((index < at.pending)[:, None, None, None], folded, now)
    if not commits:
        _put(state.state, (slot,), now, live)
    outs: list[Tensor] = []
    inputs = mixed.view(slot.shape[0], -1, mixed.shape[1])
    for index in range(rows.value.shape[1]):
        row, real = _row(rows, slice(None), index), live & (index < at.num_rows)
        after, update, out = _step(now, row)
        now = torch.where(real[:, None, None, None], after, now)
        outs.append(torch.where(real[:, None, None], out, 0))
        if not commits:
            place = slot, (at.start + index).clamp(min=0) % ring
            _put(state.keys, place, row.key, real)
            _put(state.updates, place, update, real)
            _put(state.decays, place, row.decay, real)
        place = slot, (at.start + index).clamp(min=0) % window
        _put(state.window, place, inputs[:, index], real)
    if commits:
        _put(state.state, (slot,), now, live)
    return torch.stack(outs, dim=1).flatten(0, 1).to(mixed.dtype)


def _put(into: Tensor, place: tuple[Tensor, ...], values: Tensor, real: Tensor) -> None:
    """Write values [R, ...] of the requests that are `real`. The others write their place's own values again.

    Inert requests all have the null slot. Several of them write the same values there.
    """
    kept = real.view(-1, *[1] * (values.dim() - 1))
    into.index_put_(place, torch.where(kept, values, into[place]))


def _gated_norm_fake(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return gate.new_empty(gate.shape)


@op(fake=_gated_norm_fake)
def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) * weight * silu(gate), [T, HV * DV] in the dtype of gate.

    Args:
        x: [T, HV, DV].
        gate: [T, HV * DV].
        weight: [DV], one for all heads; the same dtype or float32.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    normed = functional.rms_norm(x.to(wide), (x.shape[-1],), None, eps).to(gate.dtype)
    scaled = (weight * normed).to(gate.dtype).flatten(1)
    return (scaled * functional.silu(gate.to(wide))).to(gate.dtype)
