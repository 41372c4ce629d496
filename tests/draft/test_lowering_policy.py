"""The lowering that is chosen is the strongest that is possible, and every refusal says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from draft.on_platform import make_drafter
from draft.pairs import make_head, make_target
from specgraph_models.errors import CheckpointError
from specgraph_models.parallel import WHOLE, ExpertParallel, TensorParallel
from specgraph_run.options import GeneratorOptions
from specgraph_run.text.load import load_models

from specgraph.attention import AttentionLayer
from specgraph.capture import resolve
from specgraph.capture.model_runner import collectives_of
from specgraph.cpu.platform import CAPABILITIES, CpuPlatform
from specgraph.device import no, quirk
from specgraph.errors import UnsupportedError
from specgraph.parallel import ContextParallel


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


@pytest.mark.hazard("lowering-refused-wrongly")
@pytest.mark.parametrize(
    ("collectives", "strongest", "prefill"),
    [("none", "merged", "full"), ("in_attention", "piecewise", "piecewise"), ("anywhere", "eager", "eager")],
)
def test_a_platform_that_captures_no_collectives_runs_them_eagerly(collectives, strongest, prefill):
    without = replace(CAPABILITIES, collectives_in_graph=no("the library bakes a barrier"))
    resolution = resolve("auto", without, (), collectives=collectives)
    assert (resolution.lowering, resolution.prefill) == (strongest, prefill)
    assert ("the library bakes a barrier" in resolution.explain()) == (collectives != "none")
    assert resolve("merged", CAPABILITIES, (), collectives=collectives).lowering == "merged"


class OneOfTwo:
    """A head that says that two ranks run it."""

    ranks = TensorParallel(0, 2, "two")

    def __init__(self, head) -> None:
        self._head = head

    def __reduce__(self):
        return OneOfTwo, (self._head,)

    def __getattr__(self, name: str):
        return getattr(self._head, name)


class WithoutCollectives(CpuPlatform):
    capabilities = replace(CAPABILITIES, collectives_in_graph=no("the library bakes a barrier"))


@pytest.fixture
def without_collectives():
    return WithoutCollectives()


def test_a_head_of_several_ranks_is_not_captured_without_collectives_in_graphs(without_collectives):
    head = OneOfTwo(make_head("eagle3", make_target()))
    drafter = make_drafter(without_collectives, "auto", 2, head=head)
    assert (drafter.resolution.lowering, drafter.resolution.prefill, drafter.graphs) == ("eager", "eager", None)
    drafter.close()
    with pytest.raises(UnsupportedError, match=r"ranks run the model together.*the library bakes a barrier") as raised:
        make_drafter(without_collectives, "step", 2, head=head)
    assert "\n" not in str(raised.value)
    shares_keys = AttentionLayer(1, 1, 8, 1.0, ranks=ContextParallel(0, 2, "two"))
    assert collectives_of(SimpleNamespace(ranks=None, attention_layers=[shares_keys])) == "in_attention"
    assert collectives_of(make_target()) == "none"


def test_ranks_are_refused_before_weights_are_read(without_collectives):
    layout = SimpleNamespace(tensor_parallel=TensorParallel(0, 2, "two"), ranks=None)
    options = GeneratorOptions(decode="merged", dtype="float32")
    with pytest.raises(UnsupportedError, match=r"decode 'merged' is not possible here.*the library bakes a barrier"):
        load_models(Path("nowhere"), None, without_collectives, options, layout)
    with pytest.raises(CheckpointError, match="nowhere"):
        load_models(Path("nowhere"), None, without_collectives, replace(options, decode="auto"), layout)


def test_the_places_of_a_split_model_say_that_it_has_collectives():
    assert not WHOLE.has_collectives
    assert not TensorParallel(experts=ExpertParallel(0, 1, "all")).has_collectives
    assert TensorParallel(0, 2, "two").has_collectives
    assert TensorParallel(experts=ExpertParallel(0, 2, "all", 0, 2, "data")).has_collectives
    assert make_target().ranks is None
