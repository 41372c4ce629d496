"""Every lowering on npu gives the tokens of the cpu platform in float32, whatever the runtime's schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from specgraph_npu.attention import make_attention
from test_random_graphs import SCHEDULES

from draft.on_platform import arguments, batches_for, make_drafter, propose
from draft.pairs import make_head, make_target
from specgraph import ops
from specgraph.cpu import CpuPlatform
from specgraph.device import LOWERINGS
from specgraph.parallel import ContextParallel

ALONE = ContextParallel(0, 1, "alone")


@pytest.fixture(scope="module")
def cpu():
    return CpuPlatform()


@pytest.mark.parametrize(("k", "layers"), [(2, 1), pytest.param(5, 3, marks=pytest.mark.once)])
def test_lowerings_agree_with_each_other_and_with_cpu(npu, runtime, cpu, k, layers):
    reference = make_drafter(cpu, "eager", k, layers=layers)
    attention = make_attention(npu, "fia")
    drafters = {name: make_drafter(npu, name, k, layers=layers, attention=attention) for name in LOWERINGS}
    rounds = batches_for(reference, seed=k)
    for number in (1, 5, 2, 4, 3):
        batch = rounds.next(num_requests=number)
        expected = propose(reference, batch)
        for name, drafter in drafters.items():
            assert torch.equal(propose(drafter, batch), expected), (name, number)
    for drafter in drafters.values():
        drafter.close()


EVERYWHERE = [("merged", "fia", False), ("step", "fia", False), ("merged", "atb-paged", False)]
SCHEDULED = product(("merged", "step"), ("fia", "atb-paged", "fia-mla", "fia-v2"), (False, True))


@pytest.mark.parametrize(
    ("lowering", "name", "shared"),
    [pytest.param(*each, marks=[pytest.mark.once] * (each not in EVERYWHERE)) for each in SCHEDULED],
)
def test_random_schedules(npu, runtime, cpu, lowering, name, shared, monkeypatch):
    """Also with keys that ranks share, of one rank that holds all of them: its part goes through the same updates."""
    kind = "latent" if name == "fia-mla" else "eagle3"
    head, attention = make_head(kind, make_target()), make_attention(npu, name)
    reference = make_drafter(cpu, "eager", 3, head=head)
    if shared:
        if not attention.row.lse_flag or kind == "latent":
            pytest.skip("it takes no keys that ranks share")
        head.attention_layers = tuple(replace(layer, ranks=ALONE) for layer in head.attention_layers)
        monkeypatch.setattr(ops, "all_gather", lambda x, group, size: x)
        monkeypatch.setattr("specgraph.capture.model_runner.collectives_of", lambda model: "none")
    drafter = make_drafter(npu, lowering, 3, head=head, attention=attention)
    rounds = batches_for(reference, seed=2)
    for seed in range(SCHEDULES // 4):
        runtime.schedule(seed, delay_us=200, percent=25)
        batch = rounds.next()
        assert torch.equal(propose(drafter, batch), propose(reference, batch)), seed
    drafter.close()


def test_accepted_counts_are_read_while_the_graph_runs(npu, runtime, monkeypatch):
    """The host learns this round's accepted counts after the launch and after step 0's updates, not before."""
    from specgraph.capture.transfers import HostCopy

    drafter = make_drafter(npu, "merged", 3, attention=make_attention(npu, "fia"))
    batch = arguments(batches_for(drafter, seed=6).next(num_requests=2), npu.device)
    before, read, seen = Counter(npu.counts()), HostCopy.read, []

    def watched(self):
        seen.append(Counter(npu.counts()) - before)
        return read(self)

    monkeypatch.setattr(HostCopy, "read", watched)
    with torch.inference_mode():
        drafter.propose(**batch)
    assert (seen[0]["graph_launches"], seen[0]["task_updates"]) == (1, 1)
    npu.synchronize()
    drafter.close()


@pytest.mark.once
def test_later_steps_run_one_row_a_request(npu, runtime):
    drafter = make_drafter(npu, "merged", 3, attention=make_attention(npu, "fia"))
    rows = {}
    for descriptor, captured in drafter.graphs._captured.items():
        for step, tasks in captured.updates.tasks.items():
            rows[descriptor.num_requests, step] = tasks[0].group.issue.keywords["query"].shape[0]
    assert rows == {(n, step): n * (4 if step == 0 else 1) for n in (1, 2, 5) for step in range(3)}
    drafter.close()
