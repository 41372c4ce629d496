"""The entry point: vLLM calls `register` in every process. vllm-ascend's model runners can then draft with specgraph.

The V1 model runner makes its proposer by `get_spec_decode_method`, the V2 model runner its speculator by
`init_speculator`. Both names are imported by the runner's module, and `register` replaces them there. Plugins load
before vllm-ascend's own patches, so nothing of vllm-ascend is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from specgraph_plugin.vllm.config import KEY, read_settings, unsupported_config
from specgraph_plugin.vllm.refusals import refusals
from specgraph_plugin.when_imported import when_imported

from specgraph.errors import UnsupportedError
from specgraph_vllm_ascend.names import (
    CONFIG_MODULE,
    RUNNER_MODULE,
    V2_RUNNER_MODULE,
    differences,
    v2_runner_differences,
)
from specgraph_vllm_ascend.proposer import adopt
from specgraph_vllm_ascend.speculator import adopt_speculator

METHODS = ("eagle3", "eagle", "mtp")
"""The served speculative methods."""
NOT_SERVED = ("disable_padded_drafter_batch",)
"""Speculative options that are not served in the V1 model runner. Its own drafter may run eagerly (`enforce_eager`)."""
NOT_SERVED_V2 = (*NOT_SERVED, "enforce_eager")
"""Speculative options that are not served in the V2 model runner."""


def register() -> None:
    """Wrap what makes proposers and speculators when a model runner's module is imported. A second call changes
    nothing."""
    when_imported(CONFIG_MODULE, let_key_pass)
    when_imported(RUNNER_MODULE, wrap)
    when_imported(V2_RUNNER_MODULE, wrap_v2)


def let_key_pass(module: Any) -> None:
    """Take the plugin's key out of the arguments of `AscendConfig`, which vllm-ascend 0.30 makes from
    `additional_config` and which refuses unknown keys. vLLM's own configuration keeps the key."""
    stock = module.AscendConfig.__init__
    if hasattr(stock, "without_specgraph"):
        return

    @wraps(stock)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        options.pop(KEY, None)
        stock(self, *args, **options)

    __init__.without_specgraph = stock  # type: ignore[attr-defined]
    module.AscendConfig.__init__ = __init__


def wrap(module: Any) -> None:
    """Replace `get_spec_decode_method` in the module of the V1 model runner, unless it was replaced before."""
    stock = module.get_spec_decode_method
    if not hasattr(stock, "without_specgraph"):
        module.get_spec_decode_method = wrapped(stock)


def wrap_v2(module: Any) -> None:
    """Replace `init_speculator` in the module of the V2 model runner, each time that a runner is made.

    vllm-ascend's patch for the 310P binds the name again after the import, so the import is too early.
    """
    runner = module.NPUModelRunner
    stock = runner.__init__
    if hasattr(stock, "without_specgraph"):
        return

    @wraps(stock)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        if not hasattr(module.init_speculator, "without_specgraph"):
            module.init_speculator = wrapped_v2(module.init_speculator, module.AscendInputBatch)
        stock(self, *args, **options)

    __init__.without_specgraph = stock  # type: ignore[attr-defined]
    runner.__init__ = __init__


def unsupported(config: Any, options: Sequence[str]) -> str | None:
    """Return in one line why the plugin does not serve a `VllmConfig`. None if it does.

    Args:
        options: the names of speculative options that are not served.
    """
    if (reason := unsupported_config(config, config.compilation_config.cudagraph_mode, METHODS)) is not None:
        return reason
    if (size := config.parallel_config.tensor_parallel_size) != 1:
        return f"tensor_parallel_size {size}; one NPU is served"
    for name in options:
        if getattr(config.speculative_config, name, False):
            return f"speculative option {name}"
    return None


def require_served(config: Any, options: Sequence[str], differences: list[str]) -> None:
    """Raise UnsupportedError if the plugin does not serve a `VllmConfig` or this release of vllm-ascend.

    Args:
        options: see `unsupported`.
        differences: a line for each name that differs between vllm-ascend and the plugin.
    """
    if (reason := unsupported(config, options)) is not None:
        raise UnsupportedError(
            f"specgraph does not draft for this configuration: {reason}. Leave '{KEY}' out of --additional-config, or "
            f"set {KEY}.when_unsupported to 'vllm'"
        )
    if differences:
        raise UnsupportedError(f"this release of vllm-ascend is not served: {'; '.join(differences)}")


def wrapped(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `get_spec_decode_method` whose proposer drafts through specgraph, if the configuration has the key.

    Args:
        stock: vllm-ascend's own function.
    """

    @wraps(stock)
    def get_spec_decode_method(method: str, vllm_config: Any, device: Any, runner: Any) -> Any:
        settings = read_settings(vllm_config.additional_config)
        made = stock(method, vllm_config, device, runner)
        if settings is not None:
            with refusals(settings):
                require_served(vllm_config, NOT_SERVED, differences(stock, made))
                adopt(made, settings)
        return made

    get_spec_decode_method.without_specgraph = stock  # type: ignore[attr-defined]
    return get_spec_decode_method


def wrapped_v2(stock: Callable[..., Any], input_batch: Any) -> Callable[..., Any]:
    """Return an `init_speculator` whose speculator drafts through specgraph, if the configuration has the key.

    Args:
        stock: vllm-ascend's own function.
        input_batch: vllm-ascend's class `AscendInputBatch`.
    """

    @wraps(stock)
    def init_speculator(vllm_config: Any, *args: Any, **options: Any) -> Any:
        settings = read_settings(vllm_config.additional_config)
        made = stock(vllm_config, *args, **options)
        if settings is not None:
            with refusals(settings):
                require_served(vllm_config, NOT_SERVED_V2, v2_runner_differences(stock, made, input_batch))
                adopt_speculator(made, settings)
        return made

    init_speculator.without_specgraph = stock  # type: ignore[attr-defined]
    return init_speculator
