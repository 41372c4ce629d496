"""Broken devices: streams, times, memory figures, opening and probing."""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import specgraph_conformance.session
import torch
from mutants.platform_wrapper import WrappedGraph, WrappedPlatform, install
from mutants.registry import mutant

from specgraph.device import Discovered, Platform, Probe


@mutant("replay-on-default-stream")
def replay_on_default_stream(patch: pytest.MonkeyPatch) -> None:
    """A replay goes to the default stream, whatever stream is current."""

    class OnDefault(WrappedGraph):
        def replay(self) -> None:
            with self.platform.use(self.platform.default):
                self.inner.replay()

    class Broken(WrappedPlatform):
        graph_type = OnDefault

        def __init__(self, inner: Platform) -> None:
            super().__init__(inner)
            self.default = inner.current_stream()

    install(patch, Broken)


def _with_elapsed_time(patch: pytest.MonkeyPatch, change: Any) -> None:
    class Broken(WrappedPlatform):
        def event(self, *, timing: bool = False, external: bool = False) -> Any:
            event = self.inner.event(timing=timing, external=external)
            real = event.elapsed_time
            event.elapsed_time = lambda end: change(real(end))  # type: ignore[method-assign]
            return event

    install(patch, Broken)


@mutant("elapsed-time-units")
def elapsed_time_in_seconds(patch: pytest.MonkeyPatch) -> None:
    """elapsed_time() gives seconds."""
    _with_elapsed_time(patch, lambda milliseconds: milliseconds / 1e3)


@mutant("elapsed-time-units-zero")
def elapsed_time_is_zero(patch: pytest.MonkeyPatch) -> None:
    """elapsed_time() is always 0."""
    _with_elapsed_time(patch, lambda milliseconds: 0.0 * milliseconds)


@mutant("reserved-is-allocated")
def reserved_is_allocated(patch: pytest.MonkeyPatch) -> None:
    """memory().reserved is the bytes of living tensors."""

    class Broken(WrappedPlatform):
        def memory(self) -> Any:
            memory = self.inner.memory()
            return replace(memory, reserved=memory.allocated)

    install(patch, Broken)


def two_devices(patch: pytest.MonkeyPatch, *, open_index: Any = lambda index: index) -> None:
    """The backend under test has two devices, and `open(index)` opens the one that `open_index` gives."""

    class Indexed(WrappedPlatform):
        index = 0
        info = property(lambda self: replace(self.inner.info, device=torch.device("cpu", self.index)))

    def open_device(real: Any, index: int) -> Platform:
        made = Indexed(real(0))
        made.index = open_index(index)
        return made

    real_discover = specgraph_conformance.session.discover

    def discover() -> Any:
        found = dict(real_discover())
        for name, item in found.items():
            if (real := item.backend) is not None:
                backend = replace(
                    real,
                    probe=lambda real=real: replace(real.probe(), device_count=2),
                    open=lambda index, real=real: open_device(real.open, index),
                )
                found[name] = replace(item, backend=backend)
        return MappingProxyType(found)

    patch.setattr(specgraph_conformance.session, "discover", discover)


@mutant("open-ignores-index")
def open_ignores_index(patch: pytest.MonkeyPatch) -> None:
    """`name:1` opens device 0."""
    two_devices(patch, open_index=lambda index: 0)


@mutant("probe-cached", "specgraph.device:Discovered.probe")
def probe_cached(real: Any, self: Discovered, kept: dict[str, Probe] = {}) -> Probe:  # noqa: B006 (kept)
    """The first answer of a backend's probe is kept for the life of the process."""
    return kept.setdefault(self.name, real(self))


@mutant("failing-probe", "specgraph.device.discovery:Discovered.probe")
def failing_probe(real: Any, self: Any) -> Any:
    """An exception of a backend's probe ends the program that looked for platforms."""
    return real(self) if self.backend is None else self.backend.probe()
