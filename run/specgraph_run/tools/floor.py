"""The least time that a propose or a round can take on a device: what it reads and computes, at the best rates there.

The rates are measured in the same run as the times that are compared with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from specgraph_models.llama import LlamaTarget
from torch import Tensor

from specgraph.attention.caches import bytes_per_token
from specgraph.device import Platform
from specgraph.draft.kinds import kind_of
from specgraph_run.tools.shapes import RandomHead
from specgraph_run.tools.timing import device_time

_MIXTURE = ("router", "shared_gate_up", "shared_down")
_IN_ORDER = ("markov.output", "correction.taken", "correction.kept", "correction.inner", "correction.output")
"""Matrices of a block's draws, each of which knows the token before: they are read once for every row."""
_CHOICE = "selector.projection"
"""A matrix that is read once, for the rows of a block that predict."""
_LINEARS = ("fc", "projection", "qkv", "output", "gate_up", "down", *_MIXTURE, _CHOICE)
"""The ends of the names of a head's matrices. `fc` combines several hidden states of the target, where it has some."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The best that a device does."""

    bytes_per_second: float
    """Bandwidth of device memory: the larger one of a copy and of a read."""
    flops_per_second: float
    """Rate of a large matrix product in the dtype of the models."""


def measure_rates(platform: Platform, dtype: torch.dtype) -> DeviceRates:
    """Measure both, the best of 10 times, in about a second on a GPU.

    A copy counts the bytes it reads and those it writes. Reads are measured too because a draft step only reads its
    weights, and a read is faster than a copy.
    """
    # 2 GiB, far larger than any cache. A power of two: torch reads up to 3 % slower in a reduction over another size.
    source = torch.randn(1 << 29, device=platform.device)
    target = torch.empty_like(source)
    copied = _seconds(platform, lambda: target.copy_(source), burst=24)
    read = _seconds(platform, source.amax, burst=24)
    size = 8192
    left, right = (torch.randn(size, size, device=platform.device).to(dtype) for _ in range(2))
    product = _seconds(platform, lambda: left @ right, burst=4)
    return DeviceRates(max(2 * source.nbytes / copied, source.nbytes / read), 2 * size**3 / product)


def _seconds(platform: Platform, call: Callable[[], Any], burst: int) -> float:
    def calls() -> None:
        for _ in range(burst):
            call()

    return min(device_time(platform, calls, repeats=10, warmup=2)) / burst / 1e6


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The least work of one kernel."""

    bytes: int
    """Bytes that it reads from device memory: its weights, or the KV of every request."""
    flops: int
    """Products and sums of a linear, two per weight and row; 0 for an attention."""


def propose_floor(
    head: RandomHead, requests: int, k: int, context: int, rates: DeviceRates, cached: torch.dtype | None = None
) -> dict[str, float]:
    """Return the least microseconds of one propose.

    Returns:
        `floor_us`, the larger of reading all bytes and computing all products; `flops_floor_us`, the same number, where
        it is the products; and `kernel_floor_us`, the sum over kernels of the larger of the two, which is the least
        where kernels run one after the other.
    """
    return _least(propose_work(head, requests, k, context, cached), rates)


def round_floor(
    target: LlamaTarget, head: RandomHead | None, requests: int, k: int, context: int, rates: DeviceRates
) -> dict[str, float]:
    """Return the least microseconds of one round, as `propose_floor`: `verify_work`, and with a head `propose_work`."""
    drafting = [] if head is None else propose_work(head, requests, k, context)
    return _least(verify_work(target, requests, k + 1, context) + drafting, rates)


def _least(work: list[KernelWork], rates: DeviceRates) -> dict[str, float]:
    reading = sum(kernel.bytes for kernel in work) / rates.bytes_per_second * 1e6
    computing = sum(kernel.flops for kernel in work) / rates.flops_per_second * 1e6
    in_turn = sum(max(w.bytes / rates.bytes_per_second, w.flops / rates.flops_per_second) for w in work) * 1e6
    floor = {"floor_us": round(max(reading, computing), 1)}
    if computing > reading:
        floor["flops_floor_us"] = floor["floor_us"]
    return floor | {"kernel_floor_us": round(in_turn, 1)}


def propose_work(
    head: RandomHead, requests: int, k: int, context: int, cached: torch.dtype | None = None
) -> list[KernelWork]:
    """Return the linears and attentions of one propose of K tokens, with KV in the dtype `cached` (the head's when
    None).

    A chain drafter reads its layer, its input projection and lm_head at every step, and the projection of the target's
    hidden states once per propose. Its first step computes K + 1 rows per request up to the last layer's keys and
    values, and one row from there on; the others compute one row. A parallel drafter does everything once, for K +
    1 rows, and lm_head for K; matrices of draws in order it reads K times, for one row per request. Of a mixture it
    reads the experts that rows choose, if each chooses at random. Left out are embedding rows, norms, activations,
    the scales of FP8 weights, and the products of attention.
    """
    parallel = kind_of(head).is_one_pass
    all_of_round = requests * (k + 1)
    once, all_rows, last_rows = _matrices(head)
    work = [_linear(matrix, all_of_round) for matrix in once]
    work += [_linear(head.weights()[name], requests) for name in _IN_ORDER if name in head.weights()] * k
    mixture = head.layers[0].experts
    top_k = 0 if mixture is None else mixture.config.top_k
    for step in range(1 if parallel else k):
        rows = requests if step else all_of_round
        for shape in head.attention_layers:
            kv = requests * (context + step) * bytes_per_token([shape], cached or head.dtype)
            work.append(KernelWork(kv, 0))
            if parallel:  # keys and values of the round's rows, by weights that are read for the block's rows anyway
                size = shape.num_kv_heads * shape.head_dim
                work.append(KernelWork(0, 2 * rows * 2 * size * head.hidden_size))
        work += [_linear(matrix, rows) for matrix in all_rows]
        work += [_linear(matrix, requests * k if parallel else requests, top_k) for matrix in last_rows]
    return work


def verify_work(target: LlamaTarget, requests: int, query_len: int, context: int) -> list[KernelWork]:
    """Return the linears and attentions of one verify with `query_len` rows per request, and the logits of each row.

    Left out is what `propose_work` leaves out, and reading the logits.
    """
    rows = requests * query_len
    work: list[KernelWork] = []
    for shape, layer in zip(target.attention_layers, target.layers, strict=True):
        work.append(KernelWork(requests * context * bytes_per_token([shape], target.dtype), 0))
        weights = (layer.qkv, layer.output, layer.gate_up, layer.down)
        work += [_linear(weight.matrix, rows) for weight in weights]
    return [*work, _linear(target.lm_head, rows)]


def _linear(matrix: Tensor, rows: int, top_k: int = 0) -> KernelWork:
    """Return the work of a matrix, or of those of all experts, stacked, of which each row goes through `top_k`."""
    if matrix.dim() == 2:
        return KernelWork(matrix.nbytes, 2 * rows * matrix.numel())
    share = top_k / matrix.shape[0]
    return KernelWork(round(matrix.nbytes * (1 - (1 - share) ** rows)), round(2 * rows * share * matrix.numel()))


def _matrices(head: RandomHead) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the weights used once per propose, over all rows of the round; those used at every step, over all rows of
    the first; and those used at every step, over one row per request (a parallel drafter: K).

    A chain drafter has one layer, whose output projection and MLP run over the last rows only.
    """
    linears = [(_end(name), tensor) for name, tensor in head.weights().items()]
    linears = [(name, tensor) for name, tensor in linears if name in _LINEARS]
    once = {"fc"} if head.aux_layers else set[str]()
    last = {_CHOICE} if kind_of(head).is_one_pass else {"output", "gate_up", "down", *_MIXTURE}
    return (
        [tensor for name, tensor in linears if name in once],
        [tensor for name, tensor in linears if name not in once | last],
        [*(tensor for name, tensor in linears if name in last), head.weights()["lm_head"]],
    )


def _end(name: str) -> str:
    """Return the end of a tensor's name; the whole of it where its like is used in another way."""
    return name if name in (*_IN_ORDER, _CHOICE) else name.rpartition(".")[2]
