"""Every decision of the policy has its reason and source, and the environment chooses among the allowed ones."""

from __future__ import annotations

from importlib import import_module

import pytest
from specgraph.capture import resolve
from specgraph.device import Discovered, open_platform
from specgraph.errors import ConfigError, UnsupportedError
from specgraph_run.cli import app
from typer.testing import CliRunner

from specgraph_musa.backend import specgraph_backend
from specgraph_musa.platform import MusaPlatform
from specgraph_musa.policy import MERGED_VARIABLE, RULES, TABLE, Policy, policy_from
from specgraph_musa.trials import TRIALS


@pytest.mark.parametrize(
    ("value", "merged"), [(None, "off"), ("", "off"), ("0", "off"), ("1", "on"), ("force", "forced")]
)
def test_the_variable(value, merged):
    assert policy_from({} if value is None else {MERGED_VARIABLE: value}).merged == merged


def test_a_value_that_means_nothing_is_refused(monkeypatch):
    monkeypatch.setenv(MERGED_VARIABLE, "yes")
    with pytest.raises(ConfigError, match="0, 1 or force"):
        MusaPlatform(0)


def test_step_is_the_default_and_says_why_not_merged(musa):
    assert musa.capabilities.default_lowering == "step"
    resolution = resolve("auto", musa.capabilities, ())
    assert resolution.lowering == "step"
    assert "vllm-musa #50" in resolution.explain()


def test_allowed_merged_is_a_quirk_with_a_reason(monkeypatch):
    monkeypatch.setenv(MERGED_VARIABLE, "1")
    platform = MusaPlatform(0)
    assert platform.capabilities.merged_loop.level == "quirk"
    assert "compare acceptance" in platform.capabilities.merged_loop.reason
    assert resolve("merged", platform.capabilities, ()).lowering == "merged"


def test_captured_collectives_are_refused_unless_forced():
    allowed, forced = MusaPlatform(0, Policy(merged="on")), MusaPlatform(0, Policy(merged="forced"))
    assert resolve("auto", allowed.capabilities, ()).lowering == "merged"
    assert resolve("auto", allowed.capabilities, (), collectives="anywhere").lowering == "eager"
    with pytest.raises(UnsupportedError, match=rf"state of collectives.*{MERGED_VARIABLE}=force"):
        resolve("step", allowed.capabilities, (), collectives="anywhere")
    assert resolve("merged", forced.capabilities, (), collectives="anywhere").lowering == "merged"


def test_a_policy_allows_nothing_that_a_trial_refused(musa):
    found = {
        **dict.fromkeys(TRIALS, ""),
        "release": "by_own_call",
        "merged_loop": "a trial on this device failed: step 3",
    }
    platform = MusaPlatform(0, Policy(merged="forced"), found=found)
    assert "a trial on this device failed" in platform.capabilities.merged_loop.reason
    assert platform.capabilities.default_lowering == "step"


def test_every_rule_says_why_where_and_by_what():
    assert all(all((r.name, r.decision, r.reason, r.source, r.held_by)) for r in RULES)
    assert len({r.name for r in RULES}) == len(RULES) == len(TABLE.read_text().splitlines()) - 2 > 10


def test_explain_shows_every_rule_with_its_reason_and_source(monkeypatch):
    """The console is wide enough that no cell of the table is wrapped."""
    monkeypatch.setenv("COLUMNS", "2000")
    found = {"musa": Discovered("musa", "specgraph-musa", "0.1.0", specgraph_backend())}
    monkeypatch.setattr("specgraph.device.open_platform", lambda name: open_platform(name, found=found))
    small = "--capture-sizes 1 --max-num-requests 1 -k 2 --prefill-sizes 8 --prefill eager --max-model-len 64"
    done = CliRunner().invoke(app, ["explain", "--platform", "musa", *small.split()])
    assert done.exit_code == 0, done.output
    for rule in RULES:
        line = next(line for line in done.output.splitlines() if line.startswith(f"│ {rule.name} "))
        assert all(text in line for text in (rule.decision, rule.reason, rule.source)), rule.name
    refused = next(line for line in done.output.splitlines() if line.startswith("│ merged: refused"))
    assert f"set {MERGED_VARIABLE}=1" in refused
    assert "vllm-musa #50" in refused


def test_what_holds_a_rule_is_there():
    """The code that a row names exists."""
    for rule in RULES:
        if rule.held_by.startswith("`"):
            place, _, name = rule.held_by.strip("`").partition(".")
            module = {"Policy": "policy", "MusaGraph": "graph"}.get(place, place)
            owner = import_module(f"specgraph_musa.{module}")
            assert hasattr(getattr(owner, place, owner), name), rule.held_by
