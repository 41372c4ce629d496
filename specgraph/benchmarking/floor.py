"""The least time that a propose can take on a device: what it must read and compute, at the best rates measured there.

The rates are measured in the same run as the times that are compared with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgraph.benchmarking.shapes import RandomHead
from specgraph.benchmarking.timing import device_time
from specgraph.decoding.blocks import bytes_per_token
from specgraph.models.dflash import DFlashHead
from specgraph.models.eagle import EagleHead
from specgraph.models.layers import DecoderLayer
from specgraph.models.mtp import MtpHead
from specgraph.platforms import Platform

_BURST = 24


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The best that a device does."""

    bytes_per_second: float
    """Of device memory: the larger one of a copy and of a read."""
    flops_per_second: float
    """Of a large matrix product in the dtype of the models."""


def measure_rates(platform: Platform, dtype: torch.dtype) -> DeviceRates:
    """Measure both, in about a second on a GPU."""
    return DeviceRates(read_bandwidth(platform), matmul_rate(platform, dtype))


def read_bandwidth(platform: Platform, gibibytes: float = 4.0) -> float:
    """The bandwidth of device memory in bytes per second: the larger one of a copy and of a read, best of 10 times.

    A copy counts the bytes it reads and those it writes. Reads are measured too because a draft step only reads its
    weights, and a read is faster than a copy.

    Args:
        gibibytes: size of what is copied and read; far larger than any cache.
    """
    # A power of two, because torch reads up to 3 % slower in a reduction over another size.
    count = 1 << (int(gibibytes * 2**30) // 8).bit_length() - 1
    source = torch.randn(count, device=platform.device)
    target = torch.empty_like(source)
    copied = _seconds(platform, lambda: target.copy_(source))
    read = _seconds(platform, source.amax)
    return max(2 * source.nbytes / copied, source.nbytes / read)


def matmul_rate(platform: Platform, dtype: torch.dtype, size: int = 8192) -> float:
    """Operations per second of a product of two random square matrices, best of 10 times."""
    left, right = (torch.randn(size, size, device=platform.device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(platform, lambda: left @ right, burst=4)


def _seconds(platform: Platform, call: Callable[[], Any], burst: int = _BURST) -> float:
    def calls() -> None:
        for _ in range(burst):
            call()

    return min(device_time(platform, calls, repeats=10, warmup=2)) / burst / 1e6


def propose_floor(
    head: RandomHead, requests: int, k: int, context: int, rates: DeviceRates, cached: torch.dtype | None = None
) -> dict[str, float]:
    """`floor_us`, the least microseconds of one propose; and `flops_floor_us`, the same number, where it is arithmetic
    that takes them and not reading."""
    reading = bytes_per_propose(head, requests, k, context, cached) / rates.bytes_per_second * 1e6
    computing = flops_per_propose(head, requests, k) / rates.flops_per_second * 1e6
    if computing <= reading:
        return {"floor_us": round(reading, 1)}
    return {"floor_us": round(computing, 1), "flops_floor_us": round(computing, 1)}


def bytes_per_propose(head: RandomHead, requests: int, k: int, context: int, cached: torch.dtype | None = None) -> int:
    """The bytes that one propose of K tokens has to read from device memory: weights and the KV of every request, in
    the dtype `cached` (the head's when None).

    A chain drafter reads its layer, its input projection and lm_head at every step, and the projection of the target's
    hidden states once per propose. A parallel drafter reads everything once. Embedding rows, norms, activations and the
    scales of FP8 weights are left out: they are about a thousandth of the sum.
    """
    steps = 1 if isinstance(head, DFlashHead) else k
    kv_row = bytes_per_token(head.attention_layers, cached or head.dtype)
    kv = sum(requests * (context + step) * kv_row for step in range(steps))
    once, all_rows, last_rows = _matrices(head)
    return sum(m.nbytes for m in once) + steps * sum(m.nbytes for m in (*all_rows, *last_rows)) + kv


def flops_per_propose(head: RandomHead, requests: int, k: int) -> int:
    """The operations of the linears of one propose, two per weight and row; attention is left out.

    The first step computes K + 1 rows per request up to the last layer's keys and values, and one row from there on;
    the others compute one row.
    """
    all_of_round = requests * (k + 1)
    once, all_rows, last_rows = (sum(m.numel() for m in group) for group in _matrices(head))
    if isinstance(head, DFlashHead):
        context = sum(
            2 * shape.num_kv_heads * shape.head_dim * head.hidden_size for shape in head.attention_layers
        )  # keys and values of the round's rows, beside the block's
        return 2 * (all_of_round * (once + context + all_rows) + requests * k * last_rows)
    later = requests * (k - 1)
    return 2 * (all_of_round * once + (all_of_round + later) * all_rows + requests * k * last_rows)


def _matrices(head: RandomHead) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Weights used once per propose, over all rows of the round; those used at every step, over all rows of the first;
    and those used at every step, over one row per request (a parallel drafter: K)."""
    if isinstance(head, DFlashHead):
        matrices = [matrix for layer in head.layers for matrix in _layer_matrices(layer)]
        return [head.tensors.fc], matrices, [head.tensors.lm_head]
    if isinstance(head, MtpHead):
        module = head.modules[0]
        return [], [module.projection, module.layer.qkv], [*_layer_matrices(module.layer)[1:], head.lm_head]
    *earlier, last = head.layers
    all_rows = [matrix for layer in earlier for matrix in _layer_matrices(layer)] + [last.qkv]
    last_rows = [*_layer_matrices(last)[1:], head.tensors.lm_head]
    if isinstance(head, EagleHead):
        return [], [head.tensors.fc, *all_rows], last_rows
    return ([] if head.tensors.fc is None else [head.tensors.fc]), all_rows, last_rows


def _layer_matrices(layer: DecoderLayer) -> list[Tensor]:
    return [layer.qkv, layer.output, layer.gate_up, layer.down]
