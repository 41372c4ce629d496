"""Registers Triton kernels as the implementations of ops under a device's dispatch key.

Each package that declares ops has a `Kernels` with the launchers of its ops, and names it with `name_kernels`. A device
registers all of them. If a package is imported later, its launchers are registered then.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

import torch

from specgraph.kernels.attention import AttentionOps
from specgraph.kernels.block_tree import BlockTreeOps
from specgraph.kernels.copies import CopyOps
from specgraph.kernels.launch import Launcher, LaunchOptions
from specgraph.kernels.next_step import NextStepOps
from specgraph.kernels.ngram import NgramOps
from specgraph.kernels.past_rows import PastRowsOps
from specgraph.kernels.trial import Calls, agrees_with_reference, draft_round
from specgraph.ops.library import Around, implement, implement_all, import_installed, kernel_places, use_kernels


@dataclass(frozen=True, slots=True)
class Kernels:
    """The implementations of one package's ops."""

    launcher: type[Launcher]
    """A method with the name of an op implements this op."""
    trial: Calls
    """Calls that `agree_with_references` makes on a device before it is used."""
    others: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    """Implementations that launch no kernel of ours, by op name."""


class DraftOps(NextStepOps, AttentionOps, BlockTreeOps, CopyOps, PastRowsOps, NgramOps):
    """Launchers of the draft ops. Every launch depends only on shapes, so equal shapes give equal bits."""

    __slots__ = ()


KERNELS = Kernels(DraftOps, draft_round)

_registered: dict[str, list[Launcher]] = {}
"""The registered launchers, one per package, by dispatch key."""


def register(dispatch_key: str, options: LaunchOptions | None = None, around: Around | None = None) -> None:
    """Make the Triton kernels the implementations of the ops under a torch dispatch key.

    A second call for the same key does nothing.
    """
    if dispatch_key in _registered:
        return
    launchers = _registered[dispatch_key] = []

    def add(place: str) -> None:
        kernels: Kernels = resolve_name(place)
        launchers.append(kernels.launcher(options or LaunchOptions()))
        implement_all(launchers[-1], dispatch_key, around)
        for name, function in kernels.others.items():
            implement(name, dispatch_key, function)

    use_kernels(add)


def launchers_of(dispatch_key: str) -> Sequence[Launcher]:
    """Return the launchers registered under a dispatch key, one per package that has declared ops so far."""
    return _registered.get(dispatch_key, ())


def agree_with_references(options: LaunchOptions, device: torch.device) -> str | None:
    """Compare the kernels of all installed packages with their references on a device, without registering them.

    Return a message about the first op that differs. None if all agree.
    """
    import_installed()
    for place in kernel_places():
        kernels: Kernels = resolve_name(place)
        if (wrong := agrees_with_reference(kernels.launcher(options), kernels.trial, device)) is not None:
            return wrong
    return None
