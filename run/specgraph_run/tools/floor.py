"""The floor of a propose or a round: its reads and products at a device's best rates.

The rates are measured in the same run as the times that are compared with the floor.
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
from specgraph_run.tools.shapes import RandomHead
from specgraph_run.tools.timing import device_time

_MIXTURE = ("router", "shared_gate_up", "shared_down")
_KEPT, _INNER = "correction.kept", "correction.inner"
_IN_ORDER = ("markov.output", "correction.taken", _KEPT, _INNER, "correction.output")
"""Matrices that a block head uses to draw a token after the one before it. They are read once per draft token, but the
columns of `_INNER` for the hidden state once per propose."""
_CHOICE = "selector.projection"
"""A matrix that is read once per propose, for the K rows per request that predict a token."""
_LINEARS = ("fc", "projection", "qkv", "output", "gate_up", "down", *_MIXTURE, _CHOICE)
"""The last parts of the names of a head's matrices. `fc` combines several hidden states of the target."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The best measured rates of a device."""

    bytes_per_second: float
    """Bandwidth of device memory: the larger one of a copy and of a read."""
    flops_per_second: float
    """Rate of a large matrix product in the dtype of the models."""


def measure_rates(platform: Platform, dtype: torch.dtype) -> DeviceRates:
    """Measure the rates of a device, the best of 10 times each, in about a second on a GPU.

    A copy counts the bytes it reads and the bytes it writes. Reads are measured too, because a draft step only reads
    its weights, and a read is faster than a copy.
    """
    # 2 GiB, far larger than any cache. It is a power of two: over other sizes torch's reduction is up to 3 % slower.
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
    """The bytes and products that one kernel needs at least."""

    bytes: int
    """Bytes that it reads from device memory: its weights, or the KV of every request."""
    flops: int
    """The products and sums of a linear, two per weight and row. 0 for attention."""


def propose_floor(
    head: RandomHead, requests: int, k: int, context: int, rates: DeviceRates, cached: torch.dtype | None = None
) -> dict[str, float]:
    """Return the least microseconds of one propose.

    Returns:
        `floor_us`: the longer of two times, to read all bytes and to compute all products.
        `flops_floor_us`: the same number, present only if the products take longer.
        `kernel_floor_us`: the same maximum per kernel, summed: the floor of kernels that run one after the other.
    """
    return _least(propose_work(head, requests, k, context, cached), rates)


def round_floor(
    target: LlamaTarget, head: RandomHead | None, requests: int, k: int, context: int, rates: DeviceRates
) -> dict[str, float]:
    """Return the least microseconds of one round, with the keys of `propose_floor`. Without a head it is a verify's."""
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
    """Return the work of the linears and attentions of one propose of K tokens.

    A chain drafter reads its layer, its input projection and lm_head at every draft step. It reads the projection of
    the target's hidden states once per propose. Its first draft step computes K + 1 rows per request up to the last
    layer's keys and values, and one row from there on. Later draft steps compute one row.

    A parallel drafter does everything once, for K + 1 rows per request, and lm_head for K rows. If it draws tokens in
    order, it reads the matrices of the draws K times, for one row per request.

    A mixture reads the experts that its rows choose, as if each row chose at random. Embedding rows, norms,
    activations, the scales of FP8 weights, and the products of attention are left out.

    Args:
        cached: the dtype of the KV cache. None is the head's dtype.
    """
    parallel = head.kind.is_one_pass
    all_of_round = requests * (k + 1)
    once, all_rows, last_rows = _matrices(head)
    work = [_linear(matrix, all_of_round) for matrix in once]
    in_order = {name: tensor for name, tensor in head.weights().items() if name in _IN_ORDER}
    if (inner := in_order.get(_INNER)) is not None:
        of_hidden, in_order[_INNER] = inner.tensor_split([inner.shape[1] - in_order[_KEPT].shape[1]], dim=1)
        work.append(_linear(of_hidden, requests * k))
    work += [_linear(matrix, requests) for matrix in in_order.values()] * k
    mixture = head.layers[0].experts
    top_k = 0 if mixture is None else mixture.config.top_k
    for step in range(1 if parallel else k):
        rows = requests if step else all_of_round
        for shape in head.attention_layers:
            kv = requests * (context + step) * bytes_per_token([shape], cached or head.dtype)
            work.append(KernelWork(kv, 0))
            if parallel:  # keys and values of the verified rows: their weights are read for the block's rows anyway
                size = shape.num_kv_heads * shape.head_dim
                work.append(KernelWork(0, 2 * rows * 2 * size * head.hidden_size))
        work += [_linear(matrix, rows) for matrix in all_rows]
        work += [_linear(matrix, requests * k if parallel else requests, top_k) for matrix in last_rows]
    return work


def verify_work(target: LlamaTarget, requests: int, query_len: int, context: int) -> list[KernelWork]:
    """Return the work of one verify with `query_len` rows per request: linears, attentions and the logits of each row.

    It leaves out the same work as `propose_work`, and also reading the logits.
    """
    rows = requests * query_len
    work: list[KernelWork] = []
    for shape, layer in zip(target.attention_layers, target.layers, strict=True):
        work.append(KernelWork(requests * context * bytes_per_token([shape], target.dtype), 0))
        weights = (layer.qkv, layer.output, layer.gate_up, layer.down)
        work += [_linear(weight.matrix, rows) for weight in weights]
    return [*work, _linear(target.lm_head, rows)]


def _linear(matrix: Tensor, rows: int, top_k: int = 0) -> KernelWork:
    """Return the work of a matrix [rows, columns], or of stacked experts if each row goes through `top_k` of them."""
    if matrix.dim() == 2:
        return KernelWork(matrix.nbytes, 2 * rows * matrix.numel())
    share = top_k / matrix.shape[0]
    return KernelWork(round(matrix.nbytes * (1 - (1 - share) ** rows)), round(2 * rows * share * matrix.numel()))


def _matrices(head: RandomHead) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return a head's matrices in three lists, by how often a propose reads them and for how many rows.

    The first list is read once per propose, for all verified rows. The second is read at every draft step, and the
    first draft step reads it for all verified rows. The third is read at every draft step for one row per request; a
    parallel drafter reads it for K rows.

    A chain drafter has one layer. Its output projection and MLP run over the last rows only.
    """
    linears = [(_end(name), tensor) for name, tensor in head.weights().items()]
    linears = [(name, tensor) for name, tensor in linears if name in _LINEARS]
    once = {"fc"} if head.aux_layers else set[str]()
    last = {_CHOICE} if head.kind.is_one_pass else {"output", "gate_up", "down", *_MIXTURE}
    return (
        [tensor for name, tensor in linears if name in once],
        [tensor for name, tensor in linears if name not in once | last],
        [*(tensor for name, tensor in linears if name in last), head.weights()["lm_head"]],
    )


def _end(name: str) -> str:
    """Return the last part of a tensor's name. A name in `_IN_ORDER` or `_CHOICE` is returned whole."""
    return name if name in (*_IN_ORDER, _CHOICE) else name.rpartition(".")[2]
