"""The platform: what the probe tells, whose streams it takes, a device that is not the current one, generated text."""

from __future__ import annotations

import types

import pytest
import torch
from specgraph.cpu import CpuPlatform
from specgraph.device import Platform
from specgraph.errors import PlatformError, UnsupportedError
from specgraph_run import load_generator

from specgraph_accelerator.backend import specgraph_backend
from specgraph_accelerator.platform import AcceleratorPlatform
from specgraph_accelerator.probe import probe
from specgraph_accelerator.trials import RULES


def torch_like(**changes: object) -> types.SimpleNamespace:
    """torch with other members of torch.accelerator; None removes one."""
    names = {n: getattr(torch.accelerator, n) for n in torch.accelerator.__all__} | changes
    accelerator = types.SimpleNamespace(**{name: value for name, value in names.items() if value is not None})
    return types.SimpleNamespace(__version__="9.9", Event=torch.Event, Stream=torch.Stream, accelerator=accelerator)


def no_graphs(keep_graph: bool = False, *, pool: object = None) -> None:
    raise RuntimeError("no graph implementation\nfor it")


no_graphs.capture_begin = no_graphs.capture_end = no_graphs.replay = no_graphs.reset = lambda self: None  # type: ignore
no_graphs.pool = lambda self: None  # type: ignore[attr-defined]


def test_the_probe_finds_two_devices() -> None:
    found = probe()
    assert (found.available, found.device_count, found.reason) == (True, 2, "")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"Graph": None}, "torch 9.9 lacks accelerator.Graph: graphs of torch.accelerator need torch 2.12"),
        ({"is_available": lambda: False}, "torch sees no accelerator"),
        ({"current_accelerator": lambda: 1 / 0}, "does not answer: division by zero"),
        ({"Graph": no_graphs}, "no graphs of torch.accelerator for 'asynccpu' (no graph implementation)"),
    ],
)
def test_the_probe_says_what_is_missing(changes: dict[str, object], told: str) -> None:
    found = probe(torch_like(**changes))
    assert not found.available
    assert told in found.reason


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlatformError, match="there are 2 devices of 'asynccpu', index 2 was asked for"):
        AcceleratorPlatform(2)


def test_opened_for_trials_it_claims_nothing() -> None:
    with pytest.raises(PlatformError, match="for trials only"):
        _ = AcceleratorPlatform(0, found={}).capabilities


def test_what_it_says_of_itself(platform: Platform) -> None:
    assert platform.info.device == torch.device("asynccpu", 0)
    assert platform.info.device_kind == "threads of the CPU, no device"
    assert platform.info.simulated
    assert specgraph_backend().name == platform.info.name == "accelerator"


@pytest.mark.parametrize("vendor", ["cuda", "npu", "musa"])
def test_a_backend_for_one_vendor_goes_before_this_one(vendor: str) -> None:
    backend = pytest.importorskip(f"specgraph_{vendor}.backend").specgraph_backend()
    assert "accelerator" in backend.supersedes


def test_streams_of_others_are_refused(platform: Platform) -> None:
    for stream in (torch.Stream(device="asynccpu:1"), object()):
        with pytest.raises(PlatformError, match=r"make one with platform\.stream"), platform.use(stream):  # type: ignore
            pass


def test_external_events_are_refused_with_the_reason(platform: Platform) -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.Event has no external form"):
        platform.event(external=True)


def test_the_second_device_while_the_first_is_current() -> None:
    other = AcceleratorPlatform(1)
    x = torch.zeros(8, device=other.device)
    other.synchronize()
    assert torch.accelerator.current_device_index() == 0
    graph = other.graph()
    with graph.capture():
        assert torch.accelerator.current_device_index() == 1
        x.add_(1)
    assert torch.accelerator.current_device_index() == 0
    graph.replay()
    with pytest.raises(ZeroDivisionError), other.use(other.stream()):
        _ = 1 / 0
    assert torch.accelerator.current_device_index() == 0
    other.synchronize()
    assert x.cpu().tolist() == [1.0] * 8
    assert other.memory().allocated > 0
    graph.close()


def test_each_rule_has_a_reason_and_a_source() -> None:
    assert {"XPU", "ROCm"} <= {word for rule in RULES for word in (rule.name + " " + rule.source).replace("(", " ")
                               .replace(")", " ").replace("/", " ").split()}  # fmt: skip
    for rule in RULES:
        assert all((rule.name, rule.decision, rule.reason, rule.source, rule.held_by)), rule


@pytest.mark.parametrize("lowering", ["piecewise", "step", "merged"])
def test_the_shipped_pair_writes_what_the_cpu_writes(platform: Platform, cpu: CpuPlatform, lowering: str) -> None:
    def written(on: Platform, name: str) -> tuple[str, float]:
        generator = load_generator(platform=on, num_speculative_tokens=3, max_num_requests=1, decode=name)
        text = generator.text("def read_chunk(self, size):\n", max_tokens=24)
        length = generator.decoder.metrics.mean_acceptance_length
        generator.close()
        return str(text), length

    assert written(platform, lowering) == written(cpu, "eager")
