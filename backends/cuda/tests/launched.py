"""The Triton launchers of all packages that declare ops, as one object."""

from __future__ import annotations

from typing import Any

import specgraph_models.ops  # noqa: F401  (declares ops, as the lines after)
from specgraph_models.kernels.linears import ModelOps
from specgraph_plugin.kernels.verify_output import PluginOps
from specgraph_run.decoder.kernels.implement import DecoderOps

from specgraph.kernels.implement import DraftOps
from specgraph.kernels.launch import Launcher, LaunchOptions


class Launched:
    """Methods are those of the first launcher that has them."""

    def __init__(self, options: LaunchOptions) -> None:
        self.options = options
        self.launchers: list[Launcher] = [kind(options) for kind in (DraftOps, ModelOps, DecoderOps, PluginOps)]

    def __getattr__(self, name: str) -> Any:
        for launcher in self.launchers:
            if hasattr(launcher, name):
                return getattr(launcher, name)
        raise AttributeError(name)
