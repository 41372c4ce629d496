"""`specgraph audit`: what is the same is called so, and what is broken on purpose is named."""

from __future__ import annotations

import json

import pytest
import torch
from command import specgraph
from draft.pairs import make_head, make_target
from mutants.all import MUTANTS
from specgraph_run.tools.audit import AuditCase, as_text, audit

from specgraph import ops
from specgraph.attention import PagedHostAttention
from specgraph.cpu import CpuPlatform
from specgraph.errors import ConfigError


def run(head=None, platform=None, attention=None, progress=None, **changes):
    head = head or make_head("eagle", make_target())
    settings = {"rounds": 12, "max_num_requests": 3, "num_speculative_tokens": 3, "max_model_len": 48}
    case = AuditCase(vocab_size=make_target().vocab_size, **settings | changes)
    return audit(platform or CpuPlatform(), head, case, attention, progress)


@pytest.mark.parametrize("kind", ["eagle", "mtp-modules", "dflash"])
def test_a_sound_drafter_is_equal(kind):
    waited = []
    report = run(make_head(kind, make_target()), progress=lambda *each: waited.append(each))
    assert report["equal"]
    assert waited[-1] == ("comparing round", 12, 12)
    assert any(what == "capturing" for what, *_ in waited)
    assert (report["rounds"], report["batch_sizes"]) == (12, 3)


class Broken:
    """A draft head whose forward pass gets other hidden states."""

    pair_input = None

    def __init__(self, change):
        self.head, self.change, self.calls = make_head("eagle", make_target()), change, 0

    def __getattr__(self, name):
        return getattr(self.head, name)

    def forward(self, token_ids, hidden, *rest):
        self.calls += 1
        return self.head.forward(token_ids, self.change(self, hidden), *rest)


def test_a_python_value_in_the_forward_pass_is_found_at_step_and_layer():
    report = run(Broken(lambda head, hidden: hidden + 0.01 * (head.calls % 7)))
    assert not report["equal"]
    first = report["first"]
    assert first["tensor"].startswith("kv_cache.0.")
    assert (first["lowering"], first["layer"], first["step"]) == ("step", 0, 0)
    assert "differs from eager" in as_text(report, ("step", "merged"))


def test_a_tensor_outside_of_the_read_set_is_named():
    hidden_state = torch.randn(1)
    report = run(Broken(lambda head, hidden: hidden + hidden_state))
    assert report["first"]["tensor"] is None
    assert "test_audit.py" in report["first"]["message"]
    assert "the tensor 'hidden_state' [1]" in report["first"]["message"]


def test_lengths_that_do_not_advance_in_the_graph_show_in_a_later_step(monkeypatch):
    """The graph is captured with an op between two steps that leaves the metadata as it is; eager's moves it on."""
    real, platform = ops.greedy_next_step, CpuPlatform()

    def skipped(*arguments):
        if not platform.is_capturing():
            return real(*arguments)
        metadata = arguments[3:6]  # seq_lens, positions, slot_mapping
        kept = [tensor.clone() for tensor in metadata]
        pair = real(*arguments)
        for tensor, before in zip(metadata, kept, strict=True):
            tensor.copy_(before)
        return pair

    monkeypatch.setattr(ops, "greedy_next_step", skipped)
    report = run(platform=platform, lowerings=("merged",))
    assert not report["equal"]
    assert report["first"]["step"] >= 1


@pytest.mark.parametrize(
    ("name", "culprit"),
    [
        ("metadata-none-at-capture", {"step": 0, "layer": 0}),
        ("stale-metadata-rebound", {"step": 0, "layer": 0}),
        ("capture-at-request-time", {"step": 0}),
        ("step-ladder-overpadding", {"tensor": "kv_cache.0.key"}),
        ("padded-rows-write-kv", {"tensor": "kv_cache.0.key"}),
        ("acceptance-hidden", {"step": 1, "layer": 0}),
        ("capture-key-mismatch", "was never captured"),
        ("query-len-zero", "reads a device value"),
        ("buffer-smaller-than-padded-size", "ops/begin_rows.py"),
        ("update-prefill-decode-mixed", "lengths are given for steps [0], and the graph holds steps [0, 1, 2]"),
    ],
)
def test_known_bugs_are_named(name, culprit, monkeypatch):
    """Ten bugs of the field, put back one by one, that make graphs differ from eager or fail."""
    head, platform = make_head("eagle", make_target()), CpuPlatform()
    MUTANTS[name].apply(monkeypatch)
    attention = PagedHostAttention(platform) if name.startswith("update-") else None
    first = run(head, platform, attention, rounds=4)["first"]
    if isinstance(culprit, str):
        assert culprit in first["message"]
    else:
        assert culprit.items() <= first.items()


def test_a_case_that_does_not_fit_the_head_is_no_finding():
    with pytest.raises(ConfigError, match="num_speculative_tokens is 40, and this parallel drafter"):
        run(make_head("dflash", make_target()), num_speculative_tokens=40)


@pytest.mark.parametrize("source", [(), ("--shape", "eagle3-tiny-python")], ids=["shipped pair", "random weights"])
def test_the_command(source, monkeypatch):
    monkeypatch.setenv("SPECGRAPH_PLATFORM", "cpu")
    done = specgraph("audit", *source, "--rounds", 3, "--requests", 2, "-k", 2, "--max-model-len", 32, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["equal"]
    assert "equal to eager, bit for bit: step, merged (3 rounds" in done.stderr


def test_the_command_takes_a_factory_and_fails_where_it_differs(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECGRAPH_PLATFORM", "cpu")
    source = "from test_audit_head import head\n\ndef make(device):\n    return head\n\ndef fail(_):\n    [].pop()\n"
    (tmp_path / "my_drafter.py").write_text(source)
    module = type(json)("test_audit_head")
    module.head = Broken(lambda head, hidden: hidden + 0.01 * (head.calls % 7))
    monkeypatch.setitem(__import__("sys").modules, "test_audit_head", module)
    settings = ("--rounds", 4, "--requests", 2, "-k", 2, "--max-model-len", 48)
    done = specgraph("audit", "my_drafter:make", "--vocab-size", make_target().vocab_size, *settings, cwd=tmp_path)
    assert done.returncode == 1
    assert "kv_cache.0" in done.stdout
    for arguments, message in (
        (("my_drafter:make",), "--vocab-size"),
        (("no_such_module:make", "--vocab-size", 9), "can't be imported"),
        (("my_drafter:fail", "--vocab-size", 9), "my_drafter.py:7): IndexError: pop from empty list"),
        (("my_drafter:head.calls", "--vocab-size", 9), "TypeError: 'int' object is not callable"),
        (("builtins:str", "--vocab-size", 9), "the head str lacks kind"),
        (("some/folder",), "--target"),
        (("--target", "."), "name its drafter too"),
        (("some/folder", "--shape", "eagle3-tiny-python"), "give no folders"),
        (("--shape", "eagle3-tiny-python", "--num-modules", 1), "--num-modules is for folders of MTP drafters"),
    ):
        refused = specgraph("audit", *arguments, cwd=tmp_path)
        assert refused.returncode == 2
        assert message in refused.stderr
