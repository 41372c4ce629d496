"""The entry point: vLLM calls `register` in every process, and from then on the V2 model runner drafts with specgraph.

vLLM's V2 model runner makes its speculator in `init_speculator`, which `vllm.v1.worker.gpu.model_runner` imports by
name. That name is replaced there. Where the configuration asks for specgraph, the V1 runner is refused. vLLM is
imported in functions only, so that this package can be tested without it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from specgraph.errors import UnsupportedError
from specgraph.parallel.join import ranks_of_groups
from specgraph_vllm.config import KEY, read_settings, unsupported_config
from specgraph_vllm.draft_logits import GUMBEL, divided_by_temperature
from specgraph_vllm.mixtures import summed_in_graph
from specgraph_vllm.names import BATCH, CONFIG, FORWARD_CONTEXT, RUNNER_MODULE, TENSOR_PARALLEL, differences
from specgraph_vllm.speculator import adopt

_LOG = logging.getLogger("vllm.specgraph")


def register() -> None:
    """Wrap `init_speculator`, and the choice of the model runner. Called again, it changes nothing."""
    runner: Any = importlib.import_module(RUNNER_MODULE)
    stock: Any = runner.init_speculator
    if not hasattr(stock, "without_specgraph"):
        runner.init_speculator = wrapped(stock, _named)
        module, name = CONFIG
        config = getattr(importlib.import_module(module), name)
        config.use_v2_model_runner = property(refusing_v1(config.use_v2_model_runner.fget))


def refusing_v1(stock: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a function for `VllmConfig.use_v2_model_runner` that raises UnsupportedError, or warns once, where vLLM
    takes its V1 runner and specgraph was asked for.

    Args:
        stock: the property's own function.
    """
    told = False  # vLLM asks several times

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
    """`init_speculator` that makes specgraph's speculator of vLLM's where the configuration asks for it.

    Args:
        stock: vLLM's function.
        named: gives what a module of vLLM has under a name.
    """

    @wraps(stock)
    def init_speculator(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        settings, made = read_settings(vllm_config.additional_config), None
        try:
            if settings is not None and (reason := unsupported_config(vllm_config)) is not None:
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
                    context = summed_in_graph(context, group, ranks.tensor_parallel)
                adopt(made, settings, lambda: divided_by_temperature(named(*GUMBEL)), context, ranks)
        except UnsupportedError as error:
            if settings is None or settings.when_unsupported == "refuse":
                raise
            _LOG.warning("vLLM drafts by itself: %s", error)
        return stock(vllm_config, *args, **kwargs) if made is None else made

    init_speculator.without_specgraph = stock  # type: ignore[attr-defined]
    return init_speculator
