"""The floor's operations against torch's own count of what a propose runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specgraph_models.experts import ExpertsConfig
from specgraph_run.tools.floor import DeviceRates, propose_floor, propose_work, round_floor, verify_work
from specgraph_run.tools.rounds import random_target
from specgraph_run.tools.shapes import SHAPES, random_head
from torch.utils.flop_counter import FlopCounterMode

from specgraph.attention import allocate_caches
from specgraph.cpu.platform import CpuPlatform
from specgraph.draft import DraftConfig, Drafter

TINY = replace(SHAPES["eagle3-tiny-python"], hidden_size=64, intermediate_size=96, num_heads=4, head_dim=16)
BLOCK = replace(TINY, draft_vocab_size=TINY.vocab_size, num_layers=2, rank=24)
MIXTURE = ExpertsConfig(num_experts=6, top_k=6, inner=40, layers=(True,), scoring="sigmoid", shared_inner=24)
HEADS = {
    "eagle3": TINY,
    "eagle1": replace(TINY, kind="eagle1", draft_vocab_size=TINY.vocab_size, num_aux=0),
    "mtp": replace(TINY, kind="mtp", draft_vocab_size=TINY.vocab_size, num_aux=0),
    "mtp-experts": replace(TINY, kind="mtp", draft_vocab_size=TINY.vocab_size, num_aux=0, experts=MIXTURE),
    **{kind: replace(BLOCK, kind=kind) for kind in ("dflash", "dspark", "dflash2", "domino")},
}


MADE = {kind: random_head(shape, torch.device("cpu"), torch.float32, 64) for kind, shape in HEADS.items()}


OPS = torch.ops.specgraph
WEIGHTS = {
    OPS.norm_linear: [3],
    OPS.norm_gate_up: [3],
    OPS.linear_norm_linear: [1, 7],
    OPS.linear_norm_gate_up: [1, 7],
    OPS.draft_from_hidden: [3],
    OPS.greedy_next_step: [3],
    OPS.pair_linear: [6],
    OPS.next_state: [3, 6],
    OPS.silu_of_sum: [1],
    torch.ops.aten.mm: [1],
}
"""The arguments of each op that are weights; the first argument has a row for each row of the products."""
ROW_IDS = {OPS.draft_from_hidden: 5}
"""The argument that has the rows in place of the first, where it is there."""


def counted(call) -> tuple[int, list[tuple[int, int]]]:
    """Operations of an eager call as torch counts them, its attention left out; and of each product the bytes of its
    weight and its operations."""
    products: list[tuple[int, int]] = []

    def product(op, places):
        def count(*tensors, out_val=None, **named) -> int:
            taken = tensors[ROW_IDS.get(op, 0)]
            rows = len(tensors[0] if taken is None else taken)
            for weight in (tensors[place] for place in places):
                products.append((weight.nbytes, 2 * rows * weight.numel()))
            return sum(flops for _, flops in products[-len(places) :])

        count._get_raw = True  # it is given tensors, not shapes
        return count

    def batched(rows, weights, out_val=None, **named) -> int:
        """The context's keys and values of all layers: parts of weights that other products read whole."""
        products.extend([(0, 2 * rows.shape[1] * each.numel()) for each in weights])
        return 2 * rows.shape[1] * weights.numel()

    def mixture(rows, ids, weights, *others, out_val=None, **named) -> int:
        """Each row goes through the experts that were chosen for it; here through all."""
        stacked = [each for each in others if isinstance(each, torch.Tensor) and each.dim() == 3]
        products.extend([(each.nbytes, 2 * ids.numel() * each[0].numel()) for each in stacked])
        return sum(2 * ids.numel() * each[0].numel() for each in stacked)

    batched._get_raw = mixture._get_raw = True
    formulas = {op: product(op, places) for op, places in WEIGHTS.items()} | {
        torch.ops.aten.bmm: batched,
        OPS.expert_mlp: mixture,
    }
    with torch.inference_mode(), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        call()
    return counter.get_total_flops(), products


def counted_propose(shape, requests: int, k: int) -> tuple[int, list[tuple[int, int]]]:
    """The figures of one propose."""
    platform = CpuPlatform()
    head = random_head(shape, platform.device, torch.float32, 64)
    config = DraftConfig(
        num_speculative_tokens=k,
        max_num_requests=requests,
        max_model_len=64,
        capture_sizes=[requests],
        decode="eager",
    )
    caches = allocate_caches(head.attention_layers, 1 + 4 * requests, 16, torch.float32, platform.device)
    drafter = Drafter(head, caches, platform, config)
    drafter.capture()
    with torch.inference_mode():
        inputs = drafter.inputs(requests)
        inputs.num_sampled.fill_(1)
    found = counted(lambda: drafter.propose(inputs, copy=False))
    drafter.close()
    platform.close()
    return found


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("requests", "k"), [(1, 1), (2, 3)])
def test_the_products_are_those_that_a_propose_runs(kind, requests, k):
    head = MADE[kind]
    flops, products = counted_propose(HEADS[kind], requests, k)
    work = [kernel for kernel in propose_work(head, requests, k, 20) if kernel.flops]
    assert sum(kernel.flops for kernel in work) == flops
    assert sorted((kernel.bytes, kernel.flops) for kernel in work) == sorted(products)


def test_the_products_of_a_verify_are_those_that_a_target_runs():
    target = random_target(replace(TINY, num_layers=3), torch.device("cpu"), torch.float32, 64)
    rows = torch.arange(2 * 4)

    def verify():
        target.logits(target.forward(rows, lambda index, query, key, value: torch.zeros_like(query)).hidden)

    flops, products = counted(verify)
    work = verify_work(target, 2, 4, 20)
    assert sum(kernel.flops for kernel in work) == flops
    assert sorted((kernel.bytes, kernel.flops) for kernel in work if kernel.flops) == sorted(products)
    row = 2 * TINY.num_kv_heads * TINY.head_dim * 4
    assert [kernel.bytes for kernel in work if not kernel.flops] == [2 * 20 * row] * 3


def test_the_floor_of_a_round_is_a_verify_and_a_propose():
    target = random_target(TINY, torch.device("cpu"), torch.float32, 64)
    rates, head = DeviceRates(1e6, 1e6), MADE["eagle3"]
    alone = round_floor(target, None, 2, 0, 20, rates)
    seconds = sum(max(kernel.bytes, kernel.flops) / 1e6 for kernel in verify_work(target, 2, 1, 20))
    assert alone["kernel_floor_us"] == pytest.approx(1e6 * seconds, abs=0.06)
    drafted = sum(max(kernel.bytes, kernel.flops) / 1e6 for kernel in propose_work(head, 2, 3, 20))
    verified = sum(max(kernel.bytes, kernel.flops) / 1e6 for kernel in verify_work(target, 2, 4, 20))
    both = round_floor(target, head, 2, 3, 20, rates)
    assert both["kernel_floor_us"] == pytest.approx(1e6 * (drafted + verified), abs=0.06)


def test_attention_reads_the_keys_and_values_of_every_request():
    head = MADE["eagle3"]
    row = 2 * TINY.num_kv_heads * TINY.head_dim * 4  # keys and values of a token in float32
    read = [kernel.bytes for kernel in propose_work(head, 5, 3, 20) if not kernel.flops]
    assert read == [5 * 20 * row, 5 * 21 * row, 5 * 22 * row]
    halved = [kernel.bytes for kernel in propose_work(head, 5, 3, 20, torch.float16) if not kernel.flops]
    assert halved == [each // 2 for each in read]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    kind=st.sampled_from(list(HEADS)), requests=st.integers(1, 300), k=st.integers(1, 8),
    context=st.integers(1, 40), bandwidth=st.floats(1e5, 1e9), rate=st.floats(1e5, 1e9),
)  # fmt: skip
def test_the_floors_are_sums_of_times(kind, requests, k, context, bandwidth, rate):
    head = MADE[kind]
    work = propose_work(head, requests, k, context)
    floor = propose_floor(head, requests, k, context, DeviceRates(bandwidth, rate))
    reading, computing, in_turn = 0.0, 0.0, 0.0
    for kernel in work:
        reading += kernel.bytes / bandwidth
        computing += kernel.flops / rate
        in_turn += max(kernel.bytes / bandwidth, kernel.flops / rate)
    assert floor["floor_us"] == pytest.approx(1e6 * max(reading, computing), abs=0.06)
    assert ("flops_floor_us" in floor) == (computing > reading)
    assert floor.get("flops_floor_us", floor["floor_us"]) == floor["floor_us"]
    assert floor["kernel_floor_us"] == pytest.approx(1e6 * in_turn, abs=0.06)
    assert floor["floor_us"] <= floor["kernel_floor_us"] + 0.1
