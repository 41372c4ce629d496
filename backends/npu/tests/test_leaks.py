"""Nothing is left behind: handles and memory after many replays, proposes and captures."""

from __future__ import annotations

import gc

import torch
from specgraph_npu.attention import make_attention

from draft.on_platform import arguments, batches_for, make_drafter


def settled(npu, runtime) -> tuple[dict[str, int], list[int]]:
    gc.collect()
    npu.synchronize()
    torch.npu.empty_cache()
    report = runtime.report()
    return report["live"], report["device_bytes"]


def test_500_replays_with_updates(npu, runtime):
    x, total = torch.zeros(4, device="npu"), torch.zeros(4, device="npu")
    graph = npu.graph()
    with graph.capture():
        with npu.task_group() as group:
            x.fill_(0)
        total.add_(x)
    for _ in range(2):  # events come into being at their first record
        graph.replay()
        with npu.task_update(group):
            x.fill_(0)
    before = settled(npu, runtime)
    for i in range(500):
        graph.replay()
        with npu.task_update(group):
            x.fill_(i % 7)
    assert settled(npu, runtime) == before
    assert total.cpu().tolist() == [float(sum(i % 7 for i in range(500)))] * 4
    graph.close()


def test_30_proposes(npu, runtime):
    drafter = make_drafter(npu, "merged", 3, attention=make_attention(npu, "fia"))
    rounds = batches_for(drafter, seed=0)
    batches = [arguments(rounds.next(), npu.device) for _ in range(6)]
    with torch.inference_mode():
        for batch in batches * 2:
            drafter.propose(**batch)
        before = settled(npu, runtime)
        for _ in range(5):
            for batch in batches:
                drafter.propose(**batch)
    assert settled(npu, runtime) == before
    drafter.close()


def test_closed_drafters_give_everything_back(npu, runtime):
    """But the gates where the runtime waits for values: torch_npu 2.13 never frees those 32 bytes."""

    def once():
        drafter = make_drafter(npu, "merged", 2, attention=make_attention(npu, "fia"))
        drafter.close()

    once()
    handles, memory = settled(npu, runtime)
    for _ in range(3):
        once()
    handles_after, memory_after = settled(npu, runtime)
    assert handles_after == handles
    gates = 3 * 3 * 2 * 1024  # 3 drafters of 3 sizes and 2 steps, a 1024-byte allocation each at most
    assert memory_after[0] - memory[0] <= gates


def test_failed_captures_give_their_pool_back(npu, runtime):
    def once():
        graph = npu.graph()
        try:
            with graph.capture():
                torch.zeros(1 << 20, device="npu").add_(1)
                raise KeyError
        except KeyError:
            graph.close()

    once()
    before = settled(npu, runtime)
    for _ in range(5):
        once()
    assert settled(npu, runtime) == before
