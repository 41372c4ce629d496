"""The floor's operations against torch's own count of what a propose runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from specgraph.benchmarking.floor import DeviceRates, bytes_per_propose, flops_per_propose, propose_floor
from specgraph.benchmarking.shapes import SHAPES, random_head
from specgraph.decoding import allocate_caches
from specgraph.drafting import DraftConfig, Drafter
from specgraph.reference.platform import CpuPlatform

TINY = replace(SHAPES["eagle3-tiny-python"], hidden_size=64, intermediate_size=96, num_heads=4, head_dim=16)
HEADS = {
    "eagle3": TINY,
    "eagle1": replace(TINY, kind="eagle1", draft_vocab_size=TINY.vocab_size, num_aux=0),
    "mtp": replace(TINY, kind="mtp", draft_vocab_size=TINY.vocab_size, num_aux=0),
    "dflash": replace(TINY, kind="dflash", draft_vocab_size=TINY.vocab_size, num_layers=2),
}


def _product(x, norm, eps, weight, *rest, out_val=None, **named) -> int:
    return 2 * x.shape[0] * weight.numel()


COUNTED = {
    torch.ops.specgraph.norm_linear: _product,
    torch.ops.specgraph.norm_gate_up: _product,
    torch.ops.specgraph.greedy_head: _product,
    torch.ops.specgraph.pair_linear: lambda ids, *rest, out_val=None, **named: 2 * ids.shape[0] * rest[5].numel(),
}


def counted(shape, requests: int, k: int) -> int:
    """Operations of one eager propose, its attention left out."""
    platform = CpuPlatform()
    head = random_head(shape, platform.device, torch.float32, 64)
    config = DraftConfig(
        num_speculative_tokens=k,
        max_num_requests=requests,
        max_model_len=64,
        capture_sizes=[requests],
        lowering="eager",
    )
    caches = allocate_caches(head.attention_layers, 1 + 4 * requests, 16, torch.float32, platform.device)
    drafter = Drafter(head, caches, platform, config)
    drafter.capture()
    with torch.inference_mode():
        inputs = drafter.inputs(requests)
        inputs.num_sampled.fill_(1)
        with FlopCounterMode(
            display=False, custom_mapping={op: get_raw(function) for op, function in COUNTED.items()}
        ) as counter:
            drafter.propose(inputs, copy=False)
    drafter.close()
    platform.close()
    return counter.get_total_flops()


def get_raw(function):
    """Formulas are given tensors, not shapes."""
    function._get_raw = True
    return function


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("requests", "k"), [(1, 1), (2, 3)])
def test_the_operations_are_those_that_a_propose_runs(kind, requests, k):
    head = random_head(HEADS[kind], torch.device("cpu"), torch.float32, 64)
    assert flops_per_propose(head, requests, k) == counted(HEADS[kind], requests, k)


def test_the_floor_is_the_larger_of_reading_and_computing():
    head = random_head(TINY, torch.device("cpu"), torch.float32, 64)
    read, flops = bytes_per_propose(head, 2, 3, 20), flops_per_propose(head, 2, 3)
    assert propose_floor(head, 2, 3, 20, DeviceRates(1e6, 1e15)) == {"floor_us": float(read)}
    assert propose_floor(head, 2, 3, 20, DeviceRates(1e15, 1e6)) == dict.fromkeys(
        ("floor_us", "flops_floor_us"), float(flops)
    )
