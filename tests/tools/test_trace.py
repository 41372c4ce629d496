"""The timeline of `specgraph trace`: what is in it is what the decoder counted."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from command import specgraph
from draft.pairs import make_head, make_target

from specgraph.attention import PagedAttention, PagedHostAttention
from specgraph.device import Graph
from specgraph.device.cpu import CpuPlatform
from specgraph.engine import EngineConfig, Request, SpeculativeDecoder
from specgraph.tools.trace import part_overlapping, trace

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


def slices(report, category="user_annotation"):
    return [event for event in report["traceEvents"] if event.get("cat") == category]


def inside(event, outer):
    return outer["ts"] <= event["ts"] and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"]


@pytest.mark.parametrize(
    ("lowering", "host"), [("merged", False), ("merged", True), ("step", False), ("round", False), ("eager", False)]
)
def test_ranges_are_what_the_decoder_counted(lowering, host, tmp_path):
    decoder = make(lowering, host)
    replay, owners = Graph.replay, [set(vars(runner)) for runner in decoder.runners.values()]
    before = sum((runner.launches for runner in decoder.runners.values()), Counter())
    report = trace(decoder, requests(), ROUNDS, tmp_path / "trace.json")
    counted = sum((runner.launches for runner in decoder.runners.values()), Counter()) - before
    json.dumps(report, allow_nan=False)
    names = Counter(event["name"] for event in slices(report))
    rounds = [event for event in slices(report) if event["name"].startswith("round ")]
    assert len(rounds) == ROUNDS
    assert names["graph"] == counted.total()
    in_rounds = Counter()
    for event in rounds:
        for name, count in event["args"].items():
            if name.startswith("launches of "):
                in_rounds[name.split()[-1]] += count  # "launches of MODEL PHASE"
    assert in_rounds == counted
    assert names["target: prefill"] == 2
    passes = 3 if host else ROUNDS  # with host lengths none runs ahead
    expected = {"round: round": counted["round"]} if lowering == "round" else {"drafter: propose": passes}
    expected |= {"target: verify": passes} if lowering == "merged" else {}
    assert expected.items() <= names.items()
    launches = [name for name in names.elements() if name.startswith("launch drafter: ") and "prefill" not in name]
    assert len(launches) == {"merged": passes, "step": 3 * passes}.get(lowering, 0)
    waits = [event for event in slices(report) if event["name"].startswith("wait for the tokens")]
    assert all(any(inside(wait, each) for wait in waits) for each in rounds), "each round reads its tokens once"
    layers = len(decoder.target.stack.layers)  # a propose has 3 steps with one attention op each
    updates = {name: count for name, count in names.items() if name.startswith("update ")}
    assert updates == ({"update 3 ops": passes, f"update {layers} ops": passes} if host else {})
    assert Counter(event["name"] for event in slices(report, "cpu_op"))["specgraph::verify_drafts"] == passes
    assert decoder.num_unfinished == 0
    assert Graph.replay is replay
    assert [set(vars(runner)) for runner in decoder.runners.values()] == owners
    assert decoder.generate(requests()) == make("eager").generate(requests()), "nothing stays marked"


def test_kernels_that_overlap_in_one_stream_get_rows_that_nest():
    times = [("a", 7, 0, 10), ("b", 7, 8, 12), ("c", 7, 12, 13), ("d", 20, 1, 9), ("e", 7, 9, 11), ("f", 20, 9, 9)]
    events = [
        {"cat": "kernel", "pid": 0, "tid": stream, "name": name, "ts": start, "dur": end - start}
        for name, stream, start, end in times
    ]
    names = {event["tid"]: event["args"]["name"] for event in part_overlapping(events)}
    rows = {event["name"]: names.get(event["tid"], event["tid"]) for event in events}
    overlapping = "stream 7, overlapping 1", "stream 7, overlapping 2"
    assert rows == {"a": 7, "b": overlapping[0], "c": 7, "d": 20, "e": overlapping[1], "f": 20}


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECGRAPH_PLATFORM", "cpu")
    file = tmp_path / "trace.json"
    quick = ("--prefill", "eager", "--max-model-len", 256)
    run = specgraph("trace", "--output", file, "--rounds", 3, *quick)
    assert run.returncode == 0, run.stderr
    report = json.loads(file.read_text())
    assert report["otherData"]["platform"] == "cpu"
    assert len([event for event in slices(report) if event["name"].startswith("round ")]) == 3
    refused = specgraph("trace", "--output", tmp_path / "no" / "x.json")
    assert (refused.returncode, "there is no folder" in refused.stderr) == (2, True)
