"""The entry point: vLLM calls `register` in every process, and from then on the V2 model runner drafts with specgraph.

vLLM's V2 model runner makes its speculator in `init_speculator`, which `vllm.v1.worker.gpu.model_runner` imports by
name. That name is replaced there. vLLM is imported in functions only, so that this package can be tested without it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from specgraph.errors import UnsupportedError
from specgraph_vllm.config import KEY, read_settings, unsupported_config
from specgraph_vllm.shims import RUNNER_MODULE, SPECULATORS, shim_for
from specgraph_vllm.speculator import speculator_class

_LOG = logging.getLogger("vllm.specgraph")


def register() -> None:
    """Wrap `init_speculator`. Called again, it changes nothing."""
    runner: Any = importlib.import_module(RUNNER_MODULE)
    stock: Any = runner.init_speculator
    if not hasattr(stock, "without_specgraph"):
        runner.init_speculator = wrapped(stock, _installed_version, _stock_class)


def wrapped(
    stock: Callable[..., Any], installed_version: Callable[[], str], stock_class: Callable[[str, str], Any]
) -> Callable[..., Any]:
    """`init_speculator` that makes specgraph's speculator where the configuration asks for it.

    Args:
        stock: vLLM's function.
        installed_version: gives vLLM's version.
        stock_class: gives the class that vLLM would take, by module and name (`Shim.speculators`).
    """

    @wraps(stock)
    def init_speculator(vllm_config: Any, device: torch.device, *args: Any, **kwargs: Any) -> Any:
        settings = read_settings(vllm_config.additional_config)
        if settings is None:
            return stock(vllm_config, device, *args, **kwargs)
        try:
            shim = shim_for(installed_version())
            if (reason := unsupported_config(vllm_config, shim.speculators)) is not None:
                raise UnsupportedError(
                    f"specgraph does not draft for this configuration: {reason}. Leave '{KEY}' out of "
                    f"--additional-config, or set {KEY}.when_unsupported to 'vllm'"
                )
        except UnsupportedError as error:
            if settings.when_unsupported == "refuse":
                raise
            _LOG.warning("vLLM drafts by itself: %s", error)
            return stock(vllm_config, device, *args, **kwargs)
        made = speculator_class(stock_class(*shim.speculators[vllm_config.speculative_config.method]), shim)
        return made(settings, vllm_config, device)

    init_speculator.without_specgraph = stock  # type: ignore[attr-defined]
    return init_speculator


def _installed_version() -> str:
    return importlib.import_module("vllm").__version__


def _stock_class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{SPECULATORS}.{module}"), name)
