"""The entry point: vLLM calls `register` in every process. Its V2 model runner can then draft with specgraph.

vLLM's V2 model runner makes its speculator by `init_speculator`, a name that `vllm.v1.worker.gpu.model_runner` imports.
`register` replaces that name. If the configuration has the plugin's key, the V1 runner is refused. vLLM is imported in
functions only, so that this package can be tested without it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from specgraph_models.parallel import split_over
from specgraph_models.parallel.join import ranks_of_groups
from specgraph_plugin.vllm.config import KEY, read_settings, unsupported_config
from specgraph_plugin.vllm.refusals import refusals
from specgraph_plugin.vllm.v2_names import BATCH

from specgraph.device.installed import installed_version
from specgraph.errors import UnsupportedError
from specgraph_vllm.draft_logits import GUMBEL, divided_by_temperature
from specgraph_vllm.mixtures import summed_in_graph
from specgraph_vllm.names import CONFIG, FORWARD_CONTEXT, PLATFORMS, RUNNER_MODULE, TENSOR_PARALLEL, differences
from specgraph_vllm.speculator import adopt

_LOG = logging.getLogger("vllm.specgraph")


SERVED_DEVICES = ("cuda", "musa", "cpu")
OTHER_DISTRIBUTIONS = {"npu": "specgraph-vllm-ascend"}
"""The distributions that draft in vLLM on other devices, by vLLM's name of the device."""


def register() -> None:
    """Wrap `init_speculator` and the choice of the model runner. A second call changes nothing.

    On a device of another distribution only `refuse_device` is added.
    """
    device: str = importlib.import_module(PLATFORMS).current_platform.device_type
    if device not in SERVED_DEVICES:
        module, name = CONFIG
        refuse_device(getattr(importlib.import_module(module), name), device)
        return
    runner: Any = importlib.import_module(RUNNER_MODULE)
    stock: Any = runner.init_speculator
    if not hasattr(stock, "without_specgraph"):
        runner.init_speculator = wrapped(stock, _named)
        module, name = CONFIG
        config = getattr(importlib.import_module(module), name)
        config.use_v2_model_runner = property(refusing_v1(config.use_v2_model_runner.fget))


def refuse_device(config: Any, device: str) -> None:
    """Let each new `VllmConfig` with the plugin's key be refused, unless the distribution for `device` is installed.

    With `when_unsupported` "vllm" it warns instead.
    """
    stock, other = config.__post_init__, OTHER_DISTRIBUTIONS.get(device)
    if hasattr(stock, "without_specgraph") or (other is not None and installed_version(other)):
        return
    remedy = f"leave '{KEY}' out of --additional-config" if other is None else f"pip install {other}"

    @wraps(stock)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if (settings := read_settings(self.additional_config)) is not None:
            with refusals(settings):
                drafter = "no distribution drafts there" if other is None else f"{other} does"
                raise UnsupportedError(f"specgraph-vllm does not draft on '{device}', {drafter}: {remedy}")

    post_init.without_specgraph = stock  # type: ignore[attr-defined]
    config.__post_init__ = post_init


def refusing_v1(stock: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a getter for `VllmConfig.use_v2_model_runner` that refuses the V1 runner.

    If vLLM chooses its V1 runner and the configuration has the plugin's key, the getter raises UnsupportedError. With
    `when_unsupported` "vllm" it warns once instead.

    Args:
        stock: vLLM's own getter.
    """
    told = False  # vLLM reads the property several times

    @wraps(stock)
    def use_v2_model_runner(vllm_config: Any) -> bool:
        nonlocal told
        if used := stock(vllm_config):
            return used
        if (settings := read_settings(vllm_config.additional_config)) is not None:
            message = (
                "vLLM takes its V1 model runner for this configuration, and specgraph drafts in V2: set "
                f"VLLM_USE_V2_MODEL_RUNNER=1, or leave '{KEY}' out of --additional-config"
            )
            if settings.when_unsupported == "refuse":
                raise UnsupportedError(message)
            if not told:
                _LOG.warning("vLLM drafts by itself: %s", message)
            told = True
        return used

    return use_v2_model_runner


def _named(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"this release of vLLM is not served: it has no {module}.{name} ({error})") from error


def wrapped(stock: Callable[..., Any], named: Callable[[str, str], Any]) -> Callable[..., Any]:
    """Return an `init_speculator` that returns specgraph's speculator if the configuration has the plugin's key.

    Args:
        stock: vLLM's own `init_speculator`.
        named: returns an object by its module of vLLM and its name.
    """

    @wraps(stock)
    def init_speculator(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        settings, made = read_settings(vllm_config.additional_config), None
        try:
            graphs = vllm_config.compilation_config.cudagraph_mode
            if settings is not None and (reason := unsupported_config(vllm_config, graphs)) is not None:
                raise UnsupportedError(
                    f"specgraph does not draft for this configuration: {reason}. Leave '{KEY}' out of "
                    f"--additional-config, or set {KEY}.when_unsupported to 'vllm'"
                )
            made = stock(vllm_config, *args, **kwargs)
            if settings is not None:
                group = named(*TENSOR_PARALLEL)() if vllm_config.parallel_config.tensor_parallel_size > 1 else None
                context = named(*FORWARD_CONTEXT)
                if found := differences(made, named(*BATCH), context, group):
                    raise UnsupportedError(f"this release of vLLM is not served: {'; '.join(found)}")
                ranks = None if group is None else ranks_of_groups(group.device_group, group.cpu_group)
                if ranks is not None:
                    context = summed_in_graph(context, group, split_over(ranks))
                adopt(made, settings, lambda: divided_by_temperature(named(*GUMBEL)), context, ranks)
        except UnsupportedError as error:
            if settings is None or settings.when_unsupported == "refuse":
                raise
            _LOG.warning("vLLM drafts by itself: %s", error)
        return stock(vllm_config, *args, **kwargs) if made is None else made

    init_speculator.without_specgraph = stock  # type: ignore[attr-defined]
    return init_speculator
