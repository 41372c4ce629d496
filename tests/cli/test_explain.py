"""`specgraph explain`: what it says is captured is what is captured, and each refusal has its reason."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from command import specgraph
from draft.pairs import make_head, make_target
from specgraph_conformance.decode_rig import decoder_settings
from specgraph_run import shipped_pair
from specgraph_run.cli.captured import describe
from specgraph_run.decoder import SpeculativeDecoder

from specgraph.attention import PagedAttention, PagedHostAttention
from specgraph.cpu import CpuPlatform
from specgraph.cpu.platform import CAPABILITIES
from specgraph.device import no
from specgraph.draft import DraftTree


class NoTaskUpdate(CpuPlatform):
    """A platform that can't rewrite host parameters of captured tasks."""

    @property
    def capabilities(self):
        return replace(CAPABILITIES, task_update=no("this device has no such call"))


def report_of(kind="eagle", platform=None, host=False, **settings):
    platform = platform or CpuPlatform()
    options = {"num_speculative_tokens": 3, "max_num_requests": 4, "max_model_len": 40, "prefill_sizes": [8]}
    config = decoder_settings(**{**options, "capture_sizes": [1, 4], **settings})
    target = make_target()
    attention = PagedHostAttention(platform) if host else PagedAttention()
    with torch.inference_mode():
        decoder = SpeculativeDecoder(target, make_head(kind, target), platform, *config, attention=attention)
        report = describe(decoder)
    decoder.close()
    return report


def rows(report):
    return [
        (r["model"], r["phase"], r["requests"], r["rows"], r["k"], r["step"], r["graphs"]) for r in report["captured"]
    ]


def test_trees_for_small_batches():
    tree = DraftTree(num_steps=2, top_k=2, num_draft_tokens=5)
    report = report_of(tree=tree, draft_schedule={1: "tree", 4: 3}, decode="step", prefill="eager")
    seen = [(r["phase"], r["requests"], r["rows_per_request"], r["k"], r["tree"]) for r in report["captured"]]
    assert seen == [
        *(("verify", n, 4, 3, False) for n in (4, 1)),  # both sizes verify both: a request may have left
        *(("verify", n, 5, 2, True) for n in (4, 1)),
        *((what, 4, rows, 3, False) for what, rows in (("first", 4), ("step", 1), ("first", 3))),
        *((what, 1, rows, 2, True) for what, rows in (("first", 4), ("step", 2), ("first", 3))),
    ]
    assert (report["num_speculative_tokens"], report["tree_sizes"]) == ({1: 2, 4: 3}, [1])
    assert report["launches_per_propose"] == {2: 2, 3: 3}
    assert (report["tree"]["num_draft_tokens"], report["program"]) == (5, "ChainProgram, TreeProgram")


@pytest.mark.parametrize(("prefill", "target", "drafter"), [("auto", 1, 1), ("piecewise", 3, 2)])
def test_every_size_by_phase_and_model(prefill, target, drafter):
    assert rows(report_of(prefill=prefill)) == [
        ("target", "prefill", 1, 8, 0, 0, target),  # or two attention layers between three graphs
        ("target", "verify", 4, 16, 3, 0, 1),
        ("target", "verify", 1, 4, 3, 0, 1),
        ("drafter", "prefill", 1, 8, 0, 0, drafter),
        ("drafter", "propose", 4, 16, 3, 0, 1),
        ("drafter", "propose", 1, 4, 3, 0, 1),
    ]


def test_prompts_are_captured_whole_where_the_device_knows_the_lengths():
    assert report_of()["prefill"] == "full"
    assert report_of(host=True)["prefill"] == "piecewise"


def test_one_step_graph_serves_all_steps_and_rounds_unless_steps_differ():
    schedule = {"decode": "step", "prefill": "eager", "draft_schedule": {1: 3, 4: 2}}
    drafter = [row[1:6] for row in rows(report_of(**schedule)) if row[0] == "drafter"]
    assert drafter == [
        ("first", 4, 16, 2, 0), ("step", 4, 4, 2, 0), ("first", 4, 12, 2, 0),
        ("first", 1, 4, 3, 0), ("step", 1, 1, 3, 0), ("first", 1, 3, 3, 0),
    ]  # fmt: skip
    modules = [row[1:6] for row in rows(report_of("mtp-modules", **schedule)) if row[0] == "drafter"]
    assert [row for row in modules if row[0] == "step" and row[1] == 1] == [
        ("step", 1, 4, 3, 1), ("step", 1, 4, 3, 2), ("step", 1, 3, 3, 1), ("step", 1, 3, 3, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lowering", "launches"),
    [
        ("merged", {0: 1, 2: 1, 3: 1}),
        ("step", {0: 1, 2: 2, 3: 3}),
        ("piecewise", {0: 2, 2: 4, 3: 6}),
        ("eager", 0),
    ],
)
def test_launches_of_a_propose_by_k(lowering, launches):
    schedule = {"decode": lowering, "draft_schedule": {1: 3, 2: 2, 4: 0}, "capture_sizes": [1, 2, 4]}
    assert report_of(**schedule)["launches_per_propose"] == (launches or {0: 0, 2: 0, 3: 0})


def test_refusals_have_the_capability_s_reason():
    report = report_of(platform=NoTaskUpdate(), host=True)
    assert (report["lowering"], report["prefill"]) == ("piecewise", "piecewise")
    assert report["host_parameters"] == ["query_lens", "seq_lens"]
    assert "this device has no such call" in report["prefills"]["full"]
    assert report["prefills"]["piecewise"] == report["lowerings"]["piecewise"] == "yes"
    assert "this device has no such call" in report["refusals"]["merged"]
    assert report["eager"] == [f"attention in {way} passes: {way} piecewise" for way in ("decode", "prefill")]


def test_nothing_captured():
    report = report_of(decode="eager")
    assert report["graph_count"] == 0
    assert report["captured"] == []
    assert report["eager"] == ["verify and propose: decode eager", "prompts: prefill eager"]


def test_command():
    run = specgraph("explain", "--capture-sizes", "1", "--max-num-requests", 1, "--prefill-sizes", 64, "--json", "-")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["graph_count"] == sum(row["graphs"] for row in report["captured"]) > 3
    assert report["memory_bytes"]["drafter"]["weights"] > 1e6
    assert re.search(r"prefill[ │]+full\b", run.stderr)
    assert re.search(r"lowering[ │]+merged: the strongest; nothing refuses it", run.stderr)


def test_a_target_alone_is_captured_without_a_drafter():
    options = ("--target", shipped_pair()[0], "--max-num-requests", 1, "--prefill-sizes", 64, "--json", "-")
    run = specgraph("explain", *options)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert rows(report) == [("target", "prefill", 1, 64, 0, 0, 1), ("target", "verify", 1, 1, 0, 0, 1)]
    assert (report["program"], report["num_speculative_tokens"]) == (None, {"1": 0})
    assert "decodes without drafts" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--draft-schedule", "4"), "REQUESTS:K"),
        (("-k", "many"), "whole number, or auto"),
        (("--k-candidates", "1,2"), "-k auto"),
        (("-k", "auto", "--round-times", "no-such-file"), "no-such-file"),
        (("--capture-sizes", "a"), "whole numbers"),
        (("--capture-sizes", "99"), "outside 1..8"),
        (("--max-num-requests", "0"), "max_num_requests must be at least 1, got 0"),
        (("--draft-schedule", "2:5"), "add an entry"),
        (("--draft-schedule", "8:0"), "drafts no token at any size"),
        (("--num-modules", "2"), "it is for mtp alone"),
    ],
)
def test_bad_input_is_one_message(arguments, message):
    run = specgraph("explain", *arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
