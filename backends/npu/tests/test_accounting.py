"""Calls of a propose: counted by the platform, shown by the bench, checked against the runtime's call counters."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from specgraph_npu.attention import make_attention
from specgraph_run.cli import app
from typer.testing import CliRunner

from draft.on_platform import arguments, batches_for, make_drafter, propose


@pytest.mark.parametrize(("k", "layers"), [pytest.param(2, 3, marks=pytest.mark.once), (5, 1)])
def test_cost_of_one_merged_propose(npu, runtime, k, layers):
    """1 launch, K x layers updates, no device synchronise, at most 1 asynchronous copy to the host."""
    drafter = make_drafter(npu, "merged", k, layers=layers, attention=make_attention(npu, "fia"))
    rounds = batches_for(drafter, seed=3)
    propose(drafter, rounds.next(num_requests=2))
    batch = arguments(rounds.next(num_requests=2), npu.device)
    npu.synchronize()
    runtime.reset_report()
    before = Counter(npu.counts())
    with torch.inference_mode():
        drafter.propose(**batch)
    torch.npu.current_stream().query()  # drains torch_npu's own task queue; no wait
    calls, spent = runtime.report()["calls"], Counter(npu.counts()) - before
    assert (spent["graph_launches"], spent["task_updates"]) == (1, k * layers)
    # The gates, the end of the launch, and the accepted counts: copied on the device, then to the host
    assert spent["event_records"] == k * layers + 3
    assert (spent["event_synchronizes"], spent["synchronizes"]) == (1, 0)
    assert calls["aclmdlRIExecuteAsync"] == 1
    assert calls["aclmdlRICaptureTaskUpdateEnd"] == k * layers
    assert calls["aclrtRecordEvent"] + calls.get("aclrtValueWrite", 0) == spent["event_records"]
    assert calls["aclrtSynchronizeEvent"] == spent["event_synchronizes"]
    assert calls.get("aclrtSynchronizeDevice", 0) == 0
    assert calls.get("aclrtSynchronizeStream", 0) == 0
    assert calls.get("copy_device_to_host", 0) <= 1
    assert calls.get("aclrtMemcpy", 0) == 0
    npu.synchronize()
    drafter.close()


@pytest.mark.once
def test_bench_shows_what_a_propose_issues(npu, runtime, all_limits, tmp_path):
    """One table row per lowering, at K = 3 and one draft layer, with all limits of the runtime on and attention as
    `auto` chooses it; the output says that the device is simulated."""
    assert npu.capabilities.notes["fused KV write"]  # an op of the device's own: eager is also timed with torch's ops
    path = tmp_path / "bench.json"
    options = ["--shape", "eagle3-tiny-128", "--requests", "2", "-k", "3", "--context", "40"]
    options += ["--lowerings", "eager,piecewise,step,merged", "--repeats", "1", "--json", str(path)]
    done = CliRunner().invoke(app, ["bench", "--platform", "npu", *options], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "issued per propose" in done.output
    assert "simulated runtime under torch_npu" in done.output
    report = json.loads(path.read_text())
    assert report["device_kind"].startswith("simulated runtime")
    issued = {row["lowering"]: row["issued"] for row in report["rows"]}
    names = ("graph_launches", "task_updates", "event_records", "event_synchronizes", "synchronizes", "copies_to_host")
    assert {lowering: tuple(counts[name] for name in names) for lowering, counts in issued.items()} == {
        "eager": (0, 0, 2, 1, 0, 1),
        "eager, torch ops": (0, 0, 2, 1, 0, 1),
        "piecewise": (6, 0, 8, 1, 0, 1),  # each step in two, around its eager attention
        "step": (3, 3, 8, 1, 0, 1),
        "merged": (1, 3, 6, 1, 0, 1),
    }
    assert "floor_us" not in report["rows"][0]  # a bandwidth of a simulated device would mean nothing
