"""Kernels of gated delta nets: one makes the inputs of the recurrence, one folds records and runs the rows.

A program of the second kernel has [DK, COLUMNS] of one head's state in registers. It loops over the records that are
to be folded, then over the rows. Both loops round the product with the decay before they add the update, and both add
it in one operation: a fold gives the bits of the step. Rings have places for two passes. So programs of other columns
still read old records while new ones are written.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import ceil_div, power_of_two
from specgraph.kernels.norm import NormOps
from specgraph_models.ops.delta import L2_EPS, DeltaState, DeltaWeights, StateRows

COLUMNS = 32
"""The most columns of a head's state per program."""


@triton.jit
def _with_update(decayed, key, update):
    """Return decayed + key x update, with one rounding per element in every caller."""
    return tl.fma(
        tl.broadcast_to(key[:, None], decayed.shape), tl.broadcast_to(update[None, :], decayed.shape), decayed
    )


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _convolved(
    mixed, window, conv, base, start, index, slot, channel, inside, mixed_stride, channels, places,
    KERNEL: tl.constexpr,
):  # fmt: skip
    """Return silu of the convolution for one row and the channels `channel`, in float32, rounded to mixed's dtype."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(KERNEL):
        back = KERNEL - 1 - tap
        weight = tl.load(conv + channel * KERNEL + tap, mask=inside, other=0.0).to(tl.float32)
        place = index + channel * 0  # the row's number, for each channel
        in_pass = place >= back
        own = tl.load(mixed + (base + index - back) * mixed_stride + channel, mask=inside & in_pass, other=0.0)
        position = start + place - back
        earlier = tl.load(
            window + (slot * places + (tl.maximum(position, 0) % places)) * channels + channel,
            mask=inside & (position >= 0) & (place < back), other=0.0,
        )  # fmt: skip
        total += weight * tl.where(in_pass, own.to(tl.float32), earlier.to(tl.float32))
    rounded = total.to(mixed.dtype.element_ty).to(tl.float32)
    return (rounded / (1.0 + tl.exp(-rounded))).to(mixed.dtype.element_ty).to(tl.float32)


@triton.jit
def delta_inputs_kernel(
    mixed, gates, conv, decay_weight, dt_bias, window, start, num_rows, slots, queries, keys, values, decays, betas,
    rows, mixed_stride, gates_stride, channels, places, query_scale, l2_eps,
    KERNEL: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WK: tl.constexpr,
    WV: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per row and head: the first HK are queries and keys of a key head, then values of a value head."""
    if OVERLAP is not None:
        OVERLAP()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, index = row // rows, row % rows
    first = tl.load(start + request)
    if (first >= 0) & (index < tl.load(num_rows + request)):
        slot, base = tl.load(slots + request), request * rows
        if head < HK:
            element = tl.arange(0, WK)
            inside = element < DK
            query = _convolved(
                mixed, window, conv, base, first, index, slot, head * DK + element, inside, mixed_stride, channels,
                places, KERNEL,
            )  # fmt: skip
            key = _convolved(
                mixed, window, conv, base, first, index, slot, (HK + head) * DK + element, inside, mixed_stride,
                channels, places, KERNEL,
            )  # fmt: skip
            query *= tl.rsqrt(tl.sum(query * query, axis=0) + l2_eps)
            key *= tl.rsqrt(tl.sum(key * key, axis=0) + l2_eps)
            to = (row * HK + head) * DK + element
            tl.store(queries + to, query * query_scale, mask=inside)
            tl.store(keys + to, key, mask=inside)
        else:
            own = head - HK
            column = tl.arange(0, WV)
            fits = column < DV
            value = _convolved(
                mixed, window, conv, base, first, index, slot, 2 * HK * DK + own * DV + column, fits, mixed_stride,
                channels, places, KERNEL,
            )  # fmt: skip
            tl.store(values + (row * HV + own) * DV + column, value, mask=fits)
            b = tl.load(gates + row * gates_stride + own).to(tl.float32)
            a = tl.load(gates + row * gates_stride + HV + own).to(tl.float32)
            rate = tl.load(decay_weight + own) * _softplus(a + tl.load(dt_bias + own))
            tl.store(decays + row * HV + own, rate)
            tl.store(betas + row * HV + own, 1.0 / (1.0 + tl.exp(-b)))


@triton.jit
def delta_rule_kernel(
    queries, keys, values, decays, betas, mixed, state, key_ring, update_ring, decay_ring, window, start, num_rows,
    slots, pending, out, rows, mixed_stride, channels, places,
    RING: tl.constexpr, COMMITS: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    WK: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per request, value head and COLUMNS columns of its state."""
    if OVERLAP is not None:
        OVERLAP()
    request, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    first = tl.load(start + request)
    count = tl.load(num_rows + request)
    slot, own = tl.load(slots + request), head // (HV // HK)
    k, v = tl.arange(0, WK), part * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = k < DK, v < DV
    both = in_k[:, None] & in_v[None, :]
    at = state + ((slot * HV + head) * DK + k[:, None]) * DV + v[None, :]
    live = first >= 0
    begun = first + k * 0 > 0  # otherwise from zeros, whatever the slot holds
    now = tl.load(at, mask=both & begun[:, None], other=0.0)
    if live:
        for position in range(first - tl.load(pending + request), first):
            place = slot * RING + position % RING
            key = tl.load(key_ring + (place * HK + own) * DK + k, mask=in_k, other=0.0)
            update = tl.load(update_ring + (place * HV + head) * DV + v, mask=in_v, other=0.0)
            now = _with_update(now * tl.exp(tl.load(decay_ring + place * HV + head)), key, update)
        if not COMMITS:
            tl.store(at, now, mask=both)
    for index in range(rows):
        row = request * rows + index
        real = live & (index < count)
        to = out + (row * HV + head) * DV + v
        if real:
            key = tl.load(keys + (row * HK + own) * DK + k, mask=in_k, other=0.0)
            query = tl.load(queries + (row * HK + own) * DK + k, mask=in_k, other=0.0)
            value = tl.load(values + (row * HV + head) * DV + v, mask=in_v, other=0.0)
            rate = tl.load(decays + row * HV + head)
            now = now * tl.exp(rate)
            seen = tl.sum(now * key[:, None], axis=0)
            update = (value - seen) * tl.load(betas + row * HV + head)
            now = _with_update(now, key, update)
            tl.store(to, tl.sum(now * query[:, None], axis=0).to(out.dtype.element_ty), mask=in_v)
            if not COMMITS:
                place = slot * RING + (first + index) % RING
                tl.store(update_ring + (place * HV + head) * DV + v, update, mask=in_v)
                if part == 0:
                    tl.store(decay_ring + place * HV + head, rate)
                    if head % (HV // HK) == 0:
                        tl.store(key_ring + (place * HK + own) * DK + k, key, mask=in_k)
        else:
            tl.store(to, tl.zeros((COLUMNS,), out.dtype.element_ty), mask=in_v)
    if live:
        if COMMITS:
            tl.store(at, now, mask=both)
        programs = HV * tl.num_programs(2)
        mine = head * tl.num_programs(2) + part
        for kept in range(tl.maximum(count - places, 0), count):
            to_row = slot * places + (first + kept) % places
            for begin in range(mine * CHANNELS, channels, programs * CHANNELS):
                channel = begin + tl.arange(0, CHANNELS)
                held = channel < channels
                values_of = tl.load(mixed + (request * rows + kept) * mixed_stride + channel, mask=held, other=0.0)
                tl.store(window + to_row * channels + channel, values_of, mask=held)


@triton.jit
def gated_norm_kernel(x, gate, weight, out, size, gate_stride, heads, eps, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    """One program per row and head."""
    if OVERLAP is not None:
        OVERLAP()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    inside = column < size
    at = (row * heads + head) * size + column
    kind = out.dtype.element_ty
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = (value * tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)).to(kind).to(tl.float32)
    value = (value * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    opened = tl.load(gate + row * gate_stride + head * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (value * opened / (1.0 + tl.exp(-opened))).to(kind), mask=inside)


class DeltaOps(NormOps):
    """The implementations of `gated_delta_rule` and `gated_norm`, for rows in float32 or 16 bits."""

    __slots__ = ()

    def gated_delta_rule(
        self, mixed: Tensor, gates: Tensor, weights: DeltaWeights, state: DeltaState, at: StateRows, commits: bool
    ) -> Tensor:
        requests, (_, ring, key_heads, size_k) = at.start.shape[0], state.keys.shape
        heads, size_v, channels = state.state.shape[1], state.state.shape[3], mixed.shape[1]
        usual = mixed.stride(1) == 1 and gates.stride(1) == 1 and all(each.is_contiguous() for each in state)
        if mixed.dtype is torch.float64 or not usual:
            return NotImplemented
        total, rows = mixed.shape[0], mixed.shape[0] // requests
        made = {"dtype": torch.float32, "device": mixed.device}
        query, key = torch.empty(total, key_heads, size_k, **made), torch.empty(total, key_heads, size_k, **made)
        value, decay = torch.empty(total, heads, size_v, **made), torch.empty(total, heads, **made)
        beta, out = torch.empty(total, heads, **made), mixed.new_empty(total, heads, size_v)
        inputs = query, key, value, decay, beta
        sizes = {"HK": key_heads, "HV": heads, "DK": size_k, "DV": size_v, "WK": power_of_two(size_k)}
        self.launch(
            delta_inputs_kernel, (total, key_heads + heads),
            mixed, gates, weights.conv.contiguous(), weights.decay, weights.dt_bias, state.window, at.start,
            at.num_rows, at.slot, *inputs, rows, mixed.stride(0), gates.stride(0), channels, state.window.shape[1],
            size_k**-0.5, L2_EPS, KERNEL=weights.conv.shape[1], WV=power_of_two(size_v), num_warps=4, **sizes,
        )  # fmt: skip
        columns = min(COLUMNS, power_of_two(size_v))
        self.launch(
            delta_rule_kernel, (requests, heads, ceil_div(size_v, columns)),
            *inputs, mixed, *state, at.start, at.num_rows, at.slot, at.pending, out, rows, mixed.stride(0), channels,
            state.window.shape[1], RING=ring, COMMITS=commits, COLUMNS=columns, CHANNELS=256, num_warps=4, **sizes,
        )  # fmt: skip
        return out

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, heads, size = x.shape
        if gate.dtype is torch.float64 or gate.stride(1) != 1 or not x.is_contiguous():
            return NotImplemented
        out = gate.new_empty(gate.shape)
        if rows:
            self.launch(
                gated_norm_kernel, (rows, heads),
                x, gate, weight, out, size, gate.stride(0), heads, eps, WIDTH=power_of_two(size), num_warps=4,
            )  # fmt: skip
        return out
