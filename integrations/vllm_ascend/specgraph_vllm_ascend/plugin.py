"""The entry point: vLLM calls `register` in every process. vllm-ascend's V1 model runner can then draft with specgraph.

The V1 model runner makes its proposer by `get_spec_decode_method`, a name that its module imports. `register` replaces
that name once the module is imported, which is after vllm-ascend's own patches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from specgraph_plugin.vllm.config import KEY, read_settings, unsupported_config
from specgraph_plugin.vllm.refusals import refusals
from specgraph_plugin.when_imported import when_imported

from specgraph.errors import UnsupportedError
from specgraph_vllm_ascend.names import RUNNER_MODULE, V2_RUNNER_MODULE, differences
from specgraph_vllm_ascend.proposer import adopt

METHODS = ("eagle3", "eagle", "mtp")
"""The served speculative methods."""


def register() -> None:
    """Wrap `get_spec_decode_method` when the V1 model runner is imported, and refuse the V2 model runner when that is
    imported. A second call changes nothing."""
    when_imported(RUNNER_MODULE, wrap)
    when_imported(V2_RUNNER_MODULE, refuse_v2)


def refuse_v2(module: Any) -> None:
    """Let `init_speculator` in the module of the V2 model runner refuse a configuration with the plugin's key."""
    stock = module.init_speculator
    if hasattr(stock, "without_specgraph"):
        return

    @wraps(stock)
    def init_speculator(vllm_config: Any, *args: Any, **options: Any) -> Any:
        if (settings := read_settings(vllm_config.additional_config)) is not None:
            with refusals(settings):
                raise UnsupportedError(
                    "specgraph does not draft in vllm-ascend's V2 model runner: unset VLLM_USE_V2_MODEL_RUNNER, or "
                    f"leave '{KEY}' out of --additional-config"
                )
        return stock(vllm_config, *args, **options)

    init_speculator.without_specgraph = stock  # type: ignore[attr-defined]
    module.init_speculator = init_speculator


def wrap(module: Any) -> None:
    """Replace `get_spec_decode_method` in the module of the V1 model runner, unless it was replaced before."""
    stock = module.get_spec_decode_method
    if not hasattr(stock, "without_specgraph"):
        module.get_spec_decode_method = wrapped(stock)


def unsupported(config: Any) -> str | None:
    """Return in one line why the plugin does not serve a `VllmConfig`. None if it does."""
    settings = read_settings(config.additional_config)
    if settings is not None and settings.draft_vocab is not None:
        return f"{KEY}.draft_vocab {settings.draft_vocab}; drafters keep their vocabulary here"
    if (reason := unsupported_config(config, config.compilation_config.cudagraph_mode, METHODS)) is not None:
        return reason
    if (size := config.parallel_config.tensor_parallel_size) != 1:
        return f"tensor_parallel_size {size}; one NPU is served"
    speculative = config.speculative_config
    for name in ("disable_padded_drafter_batch", "enforce_eager"):
        if getattr(speculative, name, False):
            return f"speculative option {name}"
    return None


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
                if (reason := unsupported(vllm_config)) is not None:
                    raise UnsupportedError(
                        f"specgraph does not draft for this configuration: {reason}. Leave '{KEY}' out of "
                        f"--additional-config, or set {KEY}.when_unsupported to 'vllm'"
                    )
                if found := differences(stock, made):
                    raise UnsupportedError(f"this release of vllm-ascend is not served: {'; '.join(found)}")
                adopt(made, settings)
        return made

    get_spec_decode_method.without_specgraph = stock  # type: ignore[attr-defined]
    return get_spec_decode_method
