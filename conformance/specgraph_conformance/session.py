"""The platform under test in a run of the suite, with its description for the report and its declared gaps."""

from __future__ import annotations

import platform as system
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch
from specgraph.attention import AttentionBackend, AttentionLayer
from specgraph.device import Discovered, Platform, discover, open_platform
from specgraph.errors import ConfigError, PlatformError
from specgraph.user_code import users_code
from specgraph_run.cli.names import import_named

from specgraph_conformance.case import Case, attention_place
from specgraph_conformance.report import UNSTATED, Subject
from specgraph_conformance.sources import Source, source_of
from specgraph_conformance.standard import SUITE_VERSION, expected_ids, listed_cases
from specgraph_conformance.xfails import Xfail, entry_module, find_xfails, read_xfails


class Session:
    """One run's open platform, seed and declared gaps. `open_session` makes it."""

    def __init__(self, item: Discovered, platform: Platform, seed: int, xfails: Sequence[Xfail]) -> None:
        self.item, self.platform, self.seed = item, platform, seed
        self.subject = describe(item, platform, seed)
        self._xfails = xfails

    def problems(self, ids: Collection[str]) -> list[str]:
        """Return a line for each entry of xfails.toml that matches none of these cases and no case of the standard."""
        known = {*ids, *listed_cases(), *expected_ids(self.subject.attention)}
        return [
            f"xfails.toml declares '{xfail.case}', and there is no such case: remove or correct the entry"
            for xfail in self._xfails
            if xfail.case not in known
        ]

    def xfail_of(self, case_id: str) -> Xfail | None:
        """Return the declared gap that covers a case, or None."""
        supports = self.platform.capabilities.supports()
        return next((xfail for xfail in self._xfails if xfail.matches(case_id) and xfail.applies(supports)), None)

    def absent(self, case: Case) -> str | None:
        """Return the reason why a case does not apply to this platform. None if it applies."""
        supports = self.platform.capabilities.supports()
        for name in case.needs:
            if not supports[name]:
                return f"{name}: {supports[name].reason}"
        for name in case.unless:
            if supports[name]:
                return f"the platform has {name}, and the case is about platforms without it"
        return None

    def broken(self) -> str | None:
        """Return the error that a small computation on the device gives. None if it is right."""
        try:
            if self.platform.is_capturing():
                return "its stream is still capturing"
            value = torch.full((4,), 3.0, device=self.platform.device) + 1
            self.platform.synchronize()
            if value.tolist() != [4.0] * 4:
                return f"3 + 1 is {value.tolist()} on it"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None


def open_session(name: str, *, seed: int = 0, xfails: str | None = None, attention: Sequence[str] = ()) -> Session:
    """Open the platform that a run tests.

    Args:
        xfails: the file of declared gaps. None for the backend's own.
        attention: attention backends to test like the platform's own, each as NAME=MODULE:FUNCTION.

    Raises:
        PlatformError: the platform is unknown or not available, or has no graphs, which the suite tests.
        ConfigError: xfails.toml is malformed, or an attention backend can't be imported.
    """
    given = {word.partition("=")[0]: _attention(word) for word in attention}
    found = discover()
    platform = open_platform(name, found=found)
    if given:
        own = platform.attention_backends()
        platform.attention_backends = lambda: {**own, **given}
    item = found[name.partition(":")[0]]
    if not platform.capabilities.graphs:
        raise PlatformError(
            f"platform '{item.name}' has no graphs: {platform.capabilities.graphs.reason}. The suite tests drafting "
            "through graphs; there is nothing here for it to vouch for."
        )
    path = find_xfails(item) if xfails is None else Path(xfails)
    return Session(item, platform, seed, () if path is None else read_xfails(path))


def describe(item: Discovered, platform: Platform, seed: int) -> Subject:
    """Return a report's description of the platform: device, versions, capabilities and sources."""
    versions = {"torch": torch.__version__, item.distribution: item.version, **platform.info.versions}
    supports = platform.capabilities.supports()
    capabilities = {name: {"level": s.level, "reason": s.reason} for name, s in supports.items()}
    info = platform.info
    return Subject(
        item.name,
        info.device_name,
        info.device_kind or UNSTATED,
        versions,
        capabilities,
        seed,
        SUITE_VERSION,
        tested_attention(platform),
        item.probe().device_count,
        environment(),
        [asdict(source) for source in _sources(item)],
    )


def tested_attention(platform: Platform) -> tuple[str, ...]:
    """Return the names of the device's own attention. Backends for latent layers (DeepSeek) only are left out: no case
    has such layers."""
    latent = AttentionLayer(4, 1, 576, 1.0, torch.zeros(1, 64), latent=True)
    values = AttentionLayer(4, 4, 128, 1.0)

    def is_for_latents(backend: AttentionBackend) -> bool:
        supports = getattr(backend, "supports", None)
        return bool(supports and supports(latent, torch.bfloat16, 128) and not supports(values, torch.bfloat16, 128))

    return tuple(name for name, make in platform.attention_backends().items() if not is_for_latents(make(platform)))


def _attention(word: str) -> Callable[[Platform], AttentionBackend]:
    """Return the factory that NAME=MODULE:FUNCTION names."""
    factory = import_named(attention_place(word), f"attention '{word}'")

    def make(platform: Platform) -> AttentionBackend:
        with users_code(f"attention '{word}' failed", ConfigError):
            return factory(platform)

    return make


def environment() -> dict[str, str]:
    """Return Python's version, the operating system, the machine and the date."""
    return {
        "python": system.python_version(),
        "system": f"{system.system()} {system.release()}",
        "machine": system.machine(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _sources(item: Discovered) -> list[Source]:
    """Return the sources of the core, of the distributions that the suite uses, and of the backend's if it is
    another."""
    packages = ("specgraph", "specgraph_models", "specgraph_run", "specgraph_conformance")
    found = [source_of("specgraph-core" if p == "specgraph" else p.replace("_", "-"), p) for p in packages]
    module = entry_module(item)
    if module is not None and item.distribution not in {source.distribution for source in found}:
        found.append(source_of(item.distribution, module.partition(".")[0]))
    return found
