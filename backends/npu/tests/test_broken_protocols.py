"""Each way of breaking the update protocol that the field has seen, put back on purpose: all must be caught.

Named as in the project's list of hazards. `exec-budget` is `test_stream_budget` in test_simulator_capture.py.
"""

from __future__ import annotations

import pytest
import torch
from specgraph_npu.attention import make_attention

from draft.on_platform import arguments, batches_for, make_drafter, propose
from specgraph.attention import HostLengths, TaskKey
from specgraph.capture import UpdatePlan
from specgraph.cpu import CpuPlatform
from specgraph.draft.chain import ChainProgram
from specgraph.draft.host_lengths import HostNumbers
from specgraph.errors import UpdateError

MANY_ROUNDS = """
import torch
from draft.on_platform import *
from specgraph.attention import PagedAttention
from specgraph.cpu import CpuPlatform
from specgraph_npu.attention import make_attention
from specgraph_npu.platform import NpuPlatform
from specgraph_npu import graph, task_groups

ordered = graph.NpuGraph.order_updates
def slow_updates(self):
    ordered(self)
    with npu.npu.stream(npu.update_stream):
        work @ work  # the graph gets to its first gate long before the first update
graph.NpuGraph.order_updates = slow_updates
npu = NpuPlatform(0)
work = torch.ones(600, 600, device="npu")
{mutation}
reference = make_drafter(CpuPlatform(), "eager", 3)
drafter = make_drafter(npu, "merged", 3, attention=make_attention(npu, "fia"))
rounds = batches_for(reference, seed=4)
different = 0
try:
    for seed in range(6):
        runtime.schedule(seed, 300, 30)
        batches = [rounds.next(num_requests=2) for _ in range(4)]
        moved = [arguments(batch, npu.device, late=False) for batch in batches]
        with torch.inference_mode():
            results = [drafter.propose(**batch).token_ids for batch in moved]
        for batch, result in zip(batches, results):
            different += not torch.equal(result.cpu(), propose(reference, batch))
        if different:
            break
except RuntimeError as error:
    print("error:", str(error).strip().splitlines()[-1])
print("different:", different)
print("violations:", runtime.report()["violations"][:1])
import os
os._exit(0)
"""


def caught(done) -> bool:
    """It shows by wrong tokens in the comparison, by an error, or by the runtime's own list."""
    assert "violations:" in done.stdout, done.stderr  # it went on to its last line
    return "different: 0" not in done.stdout or "error:" in done.stdout or "violations: []" not in done.stdout


def test_unbroken_protocol_is_clean(run_script):
    done = run_script(MANY_ROUNDS.format(mutation=""), hang_seconds=3)
    assert not caught(done), done.stdout


def test_update_before_previous_replay_ends(run_script):
    done = run_script(MANY_ROUNDS.format(mutation="graph.NpuGraph.order_updates = lambda self: None"), hang_seconds=3)
    assert caught(done), done.stdout


DROPPED = "npu.waits_for_values = True"


@pytest.mark.events
def test_update_dropped_is_refused_at_capture(run_script):
    """Without value waits in the runtime, a wait captured before the event's first record is dropped."""
    done = run_script(MANY_ROUNDS.format(mutation=DROPPED), hang_seconds=3)
    assert "torch_npu would drop its captured wait" in done.stderr


@pytest.mark.events
def test_update_dropped_would_give_wrong_tokens(run_script):
    """That refusal has a reason: with a gate that looks created, the graph runs before its update."""
    pretend = """
class Dropped:
    def __init__(self, platform): self.event = npu.npu.ExternalEvent()
    def wait(self, stream):
        self.event.wait(stream)
        self.event.reset(stream)
    def record(self, stream): self.event.record(stream)
task_groups.ExternalEvent = Dropped

launch = graph.NpuGraph._launch
def launch_to_the_end(self):
    launch(self)
    npu.npu.current_stream().synchronize()  # nothing in the graph waits for an update, which comes after this
graph.NpuGraph._launch = launch_to_the_end
"""
    done = run_script(MANY_ROUNDS.format(mutation=pretend), hang_seconds=3)
    assert "error:" not in done.stdout, done.stdout  # a wait that is there would never end
    assert "different: 0" not in done.stdout


@pytest.fixture
def pair(npu, runtime):
    """A reference on the CPU, a merged drafter on the NPU, and their batches."""
    reference = make_drafter(CpuPlatform(), "eager", 3)
    drafter = make_drafter(npu, "merged", 3, attention=make_attention(npu, "fia"))
    yield reference, drafter, batches_for(reference, seed=5)
    drafter.close()


def disagreements(pair, count: int = 6) -> int:
    reference, drafter, rounds = pair
    batches = [rounds.next() for _ in range(count)]
    return sum(not torch.equal(propose(drafter, batch), propose(reference, batch)) for batch in batches)


def test_nothing_broken_agrees(pair):
    assert disagreements(pair) == 0


def test_update_missing(npu, pair, monkeypatch):
    """One op of one step gets no update: a host wait, or the next replay, says so at once instead of hanging."""
    reference, drafter, rounds = pair
    round_ = rounds.next(num_requests=2)
    batch = arguments(round_, npu.device)

    def all_but_the_last(self, lengths):
        tasks = [task for step in self.tasks.values() for task in step]
        for task in tasks[:-1]:
            with self.platform.task_update(task.group):
                task.prepare(lengths[task.key.step])()

    for go_on in (npu.synchronize, lambda: drafter.propose(**batch)):
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(UpdatePlan, "apply_in_order", all_but_the_last)
            drafter.propose(**batch)
        with pytest.raises(UpdateError, match="no update was issued"), torch.inference_mode():
            go_on()
    npu.synchronize()
    assert torch.equal(propose(drafter, round_), propose(reference, round_))  # what was wrong is written anew


def test_update_key_ignored(npu, pair):
    """A misspelt or missing step is refused before anything is launched."""
    _, drafter, _ = pair
    runner, descriptor = drafter.graphs, next(d for d in drafter.graphs.descriptors if d.num_requests == 2)
    lengths = HostLengths([1, 1], [4, 4])
    before = npu.counters["graph_launches"]
    for given in ({0: lengths, 1: lengths}, {0: lengths, 1: lengths, 3: lengths}, {}):
        with pytest.raises(UpdateError, match="steps"):
            runner.replay(descriptor, given)
    assert npu.counters["graph_launches"] == before
    npu.synchronize()


def test_update_prefill_decode_mixed(npu, runtime):
    """Two captures of one size can't share a list of updates: the same op twice is refused."""
    plan = UpdatePlan(npu, 2)
    x = torch.zeros(2, device="npu")
    for value in (1, 2):
        graph = npu.graph()
        with graph.capture(), npu.task_group() as group:
            x.fill_(value)
        if value == 2:
            with pytest.raises(UpdateError, match="captured twice"):
                plan.add(TaskKey(0, 0), group, lambda lengths: lambda: None)
        else:
            plan.add(TaskKey(0, 0), group, lambda lengths: lambda: None)
        graph.close()


def test_rejected_tokens_in_lengths(pair, monkeypatch):
    def without_rejections(self):
        return [self.query_len] * len(self.start_positions)

    monkeypatch.setattr(HostNumbers, "counts", without_rejections)
    assert disagreements(pair) > 0


def test_per_step_lengths_not_updated(pair, monkeypatch):
    honest = ChainProgram.host_lengths

    def frozen(self, step, host_numbers):
        return honest(self, min(step, 1), host_numbers)

    monkeypatch.setattr(ChainProgram, "host_lengths", frozen)
    assert disagreements(pair, 60) > 0  # one key less, which few drafts depend on


@pytest.mark.once
def test_step_ladder_overpadding(run_script):
    """Later steps captured at K + 1 rows per request don't take one-row lengths: refused before the update begins."""
    done = run_script(
        """
        import torch
        from draft.on_platform import *
        from specgraph_npu.attention import make_attention
        from specgraph_npu.platform import NpuPlatform
        from specgraph.draft.chain import ChainProgram
        def overpadded(self, buffers, make_attend, step):
            rows = buffers.hidden.repeat_interleave(4, 0), buffers.step_token_ids.repeat_interleave(4, 0)
            self.head.forward(rows[1], rows[0], make_attend(buffers.first, step))
        ChainProgram.step, ChainProgram.joined_steps = overpadded, lambda self: None
        npu = NpuPlatform(0)
        drafter = make_drafter(npu, "merged", 3, attention=make_attention(npu, "fia"))
        batch = arguments(batches_for(drafter, 0).next(num_requests=2), npu.device, late=False)
        try:
            with torch.inference_mode():
                drafter.propose(**batch)
            npu.synchronize()
        except Exception as error:
            print("caught:", "query_lens [1, 1] are 2 rows; the op has 8" in str(error), str(error)[:3000])
        import os
        os._exit(0)
        """,
        TASK_QUEUE_ENABLE=0,
        hang_seconds=3,
    )
    assert "caught: True" in done.stdout, done.stdout + done.stderr
