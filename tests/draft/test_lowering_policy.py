"""The lowering that is chosen is the strongest that is possible, and every refusal says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specgraph.capture import resolve
from specgraph.cpu.platform import CAPABILITIES
from specgraph.device import no, quirk
from specgraph.errors import UnsupportedError


def test_auto_takes_the_strongest_up_to_the_default():
    assert resolve("auto", CAPABILITIES, ()).lowering == "merged"
    stepwise = resolve("auto", replace(CAPABILITIES, default_lowering="step"), ())
    assert stepwise.lowering == "step"
    assert stepwise.refusals == {"merged": "the platform's default is step"}


def test_a_refusal_keeps_the_capability_s_reason_though_the_default_is_weaker_anyway():
    opted_out = replace(CAPABILITIES, default_lowering="step", merged_loop=no("set LOOPS=1 to allow it"))
    resolution = resolve("auto", opted_out, ())
    assert resolution.lowering == "step"
    assert "set LOOPS=1 to allow it" in resolution.refusals["merged"]
    assert "set LOOPS=1 to allow it" in resolution.explain()
    with pytest.raises(UnsupportedError, match="set LOOPS=1 to allow it"):
        resolve("merged", opted_out, ())


def test_a_quirk_above_the_default_runs_only_by_name():
    capabilities = replace(CAPABILITIES, default_lowering="step", merged_loop=quirk("only without collectives"))
    assert resolve("auto", capabilities, ()).lowering == "step"
    assert resolve("merged", capabilities, ()).lowering == "merged"


@pytest.mark.parametrize(
    ("decode", "host", "prefill"),
    [("eager", (), "eager"), ("piecewise", (), "piecewise"), ("merged", (), "full"), ("step", ("lens",), "piecewise")],
)
def test_prompts_run_as_the_lowering_does_without_updates_of_their_attention(decode, host, prefill):
    assert resolve(decode, CAPABILITIES, host).prefill == prefill
    for named in ("eager", "piecewise", "full"):
        resolution = resolve(decode, CAPABILITIES, host, named)
        assert (resolution.lowering, resolution.prefill) == (decode, named)
