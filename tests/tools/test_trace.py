"""The timeline of `specgraph trace`: what is in it is what the decoder counted, and events lie within their round."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch
from command import specgraph
from draft.pairs import make_head, make_target

from specgraph import EngineConfig, Request, SpeculativeDecoder
from specgraph.attention import PagedAttention, PagedHostAttention
from specgraph.device import Graph
from specgraph.device.cpu import CpuPlatform
from specgraph.tools.trace import timeline, trace

ROUNDS = 4


def make(lowering, host=False):
    platform, target = CpuPlatform(), make_target()
    config = EngineConfig(
        num_speculative_tokens=3, max_num_requests=2, max_model_len=48, decode=lowering, prefill_sizes=[8],
        capture_sizes=[2],
    )  # fmt: skip
    attention = PagedHostAttention(platform) if host else PagedAttention()
    decoder = SpeculativeDecoder(target, make_head("eagle", target), platform, config, attention=attention)
    with torch.inference_mode():
        decoder.capture()
    return decoder


def requests():
    return [Request(prompt_token_ids=[1, 2, 3], max_tokens=30), Request(prompt_token_ids=[4, 5], max_tokens=30)]


def slices(report, category=None):
    found = [event for event in report["traceEvents"] if event["ph"] == "X"]
    return [event for event in found if category is None or event["cat"] == category]


def inside(event, outer, slack=1.0):
    ends = event["ts"] + event["dur"], outer["ts"] + outer["dur"]
    return outer["ts"] - slack <= event["ts"] and ends[0] <= ends[1] + slack


@pytest.mark.parametrize("lowering", ["merged", "step", "round"])
def test_launches_are_those_that_the_decoder_counted(lowering):
    decoder = make(lowering)
    before = sum((runner.launches for runner in decoder.runners.values()), Counter())
    report = trace(decoder, requests(), ROUNDS)
    counted = sum((runner.launches for runner in decoder.runners.values()), Counter()) - before
    assert len(slices(report, "round")) == ROUNDS
    assert len(slices(report, "graph")) == counted.total()
    in_rounds = Counter()
    for event in slices(report, "round"):
        for name, count in event["args"].items():
            in_rounds[name.split()[-1]] += count  # "launches of MODEL PHASE"
    assert in_rounds == counted
    passes = Counter(event["name"] for event in slices(report, "pass"))
    assert passes["target: prefill"] == 2
    per_round = {"merged": {"target: verify": 4, "drafter: propose": 4}, "round": {"round: round": counted["round"]}}
    for name, count in per_round.get(lowering, {"drafter: propose": 4}).items():
        assert passes[name] == count
    if lowering == "step":
        proposes = [
            e for e in slices(report, "launch") if e["name"].startswith("drafter: ") and "prefill" not in e["name"]
        ]
        assert len(proposes) == 3 * passes["drafter: propose"]
    assert decoder.num_unfinished == 0


@pytest.mark.parametrize("host", [False, True])
def test_events_lie_within_what_they_belong_to(host):
    decoder = make("merged", host)
    report = trace(decoder, requests(), ROUNDS)
    rounds = slices(report, "round")
    for inner, outer in (("pass", "round"), ("launch", "pass"), ("graph", "launch"), ("op in a graph", "graph")):
        assert slices(report, inner)
        for event in slices(report, inner):
            assert any(inside(event, around) for around in slices(report, outer)), (event, outer)
    waits = slices(report, "wait")
    assert all(any(inside(wait, each) for wait in waits) for each in rounds), "each round reads its tokens once"
    updates = Counter(event["name"] for event in slices(report, "task update"))
    layers = len(decoder.target.stack.layers)
    rounds = 3 if host else 4  # with host lengths none runs ahead; a propose has 3 steps with one attention op each
    assert updates == ({"update 3 ops": rounds, f"update {layers} ops": rounds} if host else {})
    ops = Counter(event["name"] for event in slices(report, "op in a graph"))
    assert ops["specgraph::verify_drafts"] == rounds


def test_rows_have_names_and_nothing_stays_marked():
    decoder = make("merged")
    replay, owners = Graph.replay, [dict(vars(runner)) for runner in decoder.runners.values()]
    report = trace(decoder, requests(), 2)
    named = {(e["pid"], e["tid"]) for e in report["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in slices(report)} <= named
    assert Graph.replay is replay
    assert [set(vars(runner)) for runner in decoder.runners.values()] == [set(each) for each in owners]
    assert decoder.generate(requests()) == make("eager").generate(requests())


def faults(report):
    """Where a file breaks what a reader of Chrome's trace format relies on.

    The rules: complete events and metadata only, numbers that JSON can say, every process and row named once, times
    not negative, and the slices of a row either nest or don't touch (to a nanosecond, as Perfetto counts).
    """
    found, rows = [], defaultdict(list)
    events = json.loads(json.dumps(report, allow_nan=False))["traceEvents"]
    metadata = Counter((e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M")
    found += [f"{key} is said {count} times" for key, count in metadata.items() if count > 1]
    for event in events:
        if event["ph"] == "M":
            continue
        process, row = event["pid"], event["tid"]
        if event["ph"] != "X" or not event["name"] or not event["cat"] or event["ts"] < 0 or event["dur"] <= 0:
            found.append(f"not a slice: {event}")
        if ("process_name", process, 0) not in metadata or ("thread_name", process, row) not in metadata:
            found.append(f"row {process}, {row} has no name")
        rows[process, row].append(
            (round(event["ts"] * 1000), -round((event["ts"] + event["dur"]) * 1000), event["name"])
        )
    for key, places in rows.items():
        open_until = []
        for start, end, name in sorted(places):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            if open_until and -end > open_until[-1]:
                found.append(f"row {key}: {name} begins within another slice and ends after it")
            open_until.append(-end)
    return found


@pytest.mark.parametrize("lowering", ["merged", "step", "round", "eager"])
def test_the_format(lowering):
    assert faults(trace(make(lowering), requests(), 2)) == []


class Work:
    """A kernel as the profiler tells of it."""

    def __init__(self, name, stream, start, end):
        self.name, self.device_resource_id, self.time_range = name, stream, SimpleNamespace(start=start, end=end)
        self.device_type = SimpleNamespace(name="CUDA")


def test_kernels_that_overlap_in_one_stream_get_rows_that_nest():
    times = [("a", 7, 0, 10), ("b", 7, 8, 12), ("c", 7, 12, 13), ("d", 20, 1, 9), ("e", 7, 9, 11), ("f", 20, 9, 9)]
    report = timeline(CpuPlatform(), [Work(*each) for each in times], [])
    assert faults(report) == []
    named = {e["tid"]: e["args"]["name"] for e in report["traceEvents"] if e["pid"] == 2 and e["name"] == "thread_name"}
    rows = {event["name"]: named[event["tid"]] for event in slices(report, "device")}
    assert rows["d"] == rows["f"] == "stream 20"
    assert [rows[name] for name in "abce"] == [
        "stream 7", "stream 7, overlapping 1", "stream 7", "stream 7, overlapping 2"
    ]  # fmt: skip
    place = next(event for event in report["traceEvents"] if event["ph"] == "X" and event["name"] == "b")
    place["tid"] = next(row for row, name in named.items() if name == "stream 7")
    assert faults(report) == ["row (2, 0): b begins within another slice and ends after it"]
    place["tid"] = 99
    assert faults(report) == ["row 2, 99 has no name"]


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECGRAPH_PLATFORM", "cpu")
    file = tmp_path / "trace.json"
    quick = ("--prefill", "eager", "--max-model-len", 256)
    run = specgraph("trace", "--output", file, "--rounds", 3, *quick)
    assert run.returncode == 0, run.stderr
    assert "3 x round" in " ".join(run.stdout.split())  # lines are wrapped
    report = json.loads(file.read_text())
    assert report["otherData"]["platform"] == "cpu"
    assert len(slices(report, "round")) == 3
    refused = specgraph("trace", "--output", tmp_path / "no" / "x.json")
    assert (refused.returncode, "there is no folder" in refused.stderr) == (1, True)
