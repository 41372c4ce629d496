"""A claimed capability whose probe fails on the device at hand is not claimed."""

from __future__ import annotations

import pytest
from device_memory import live, reserved
from specgraph.drafting import resolve

from specgraph_musa.platform import MusaPlatform
from specgraph_musa.policy import Policy
from specgraph_musa.probes import claim
from torch_musa import simulated
from torch_musa.forms import form

COUNTED = pytest.mark.skipif(form.NAME != "cpu", reason="this form does not count a graph's nodes")


def opened() -> MusaPlatform:
    return MusaPlatform(0, Policy(merged="forced"))


def test_on_a_sound_device_all_is_claimed():
    capabilities = opened().capabilities
    for name in ("graphs", "shared_pool", "merged_loop", "random_in_graph"):
        assert getattr(capabilities, name), name


@pytest.mark.parametrize(
    ("defect", "capability", "told"),
    [
        ("replays_once", "graphs", "replay 1 gave a wrong product"),
        ("pool_overlaps", "shared_pool", "second graph"),
        ("random_baked", "random_in_graph", "the same numbers"),
        pytest.param("loop_stops_short", "merged_loop", "step 0 of replay 0", marks=COUNTED),
    ],
)
def test_a_drifted_claim_is_withdrawn_with_what_was_seen(defect, capability, told):
    setattr(simulated.defects, defect, True)
    support = getattr(opened().capabilities, capability)
    assert not support
    assert "its probe failed on this device" in support.reason
    assert told in support.reason


def test_without_graphs_nothing_that_needs_them_is_claimed():
    simulated.defects.replays_once = True
    capabilities = opened().capabilities
    assert not any((capabilities.shared_pool, capabilities.merged_loop, capabilities.random_in_graph))
    assert resolve("auto", capabilities, ()).lowering == "eager"


def test_a_device_that_can_t_capture_opens_for_eager_work():
    simulated.defects.max_live_graphs = 0
    capabilities = opened().capabilities
    assert "out of resources" in capabilities.graphs.reason
    assert resolve("auto", capabilities, ()).lowering == "eager"


def test_probing_leaves_the_generator_where_it_was(musa):
    before = musa.musa.get_rng_state(0)
    opened()
    assert before.equal(musa.musa.get_rng_state(0))


def test_probing_leaves_no_graph_and_no_memory_behind(musa):
    before = live(musa), reserved(musa)
    opened()
    assert (live(musa), reserved(musa)) == before


def test_a_probe_that_raises_is_a_probe_that_failed():
    def broken() -> None:
        raise RuntimeError("device lost\nlong story")

    support = claim(broken, "something")
    assert not support
    assert support.reason.endswith("something: RuntimeError: device lost")
