"""The names of vLLM that the plugin uses, and their comparison with the installed release."""

from __future__ import annotations

from typing import Any

from specgraph_plugin.host_engine_names import missing_members, parameters
from specgraph_plugin.vllm.v2_names import v2_differences

RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
PLATFORMS = "vllm.platforms"
"""The module with `current_platform`, which has a `device_type`."""
CONFIG = "vllm.config", "VllmConfig"
"""The class with the property `use_v2_model_runner`."""
TENSOR_PARALLEL = "vllm.distributed.parallel_state", "get_tp_group"
"""A function that returns the group of ranks that split the model. The group has process groups and an all-reduce."""
FORWARD_CONTEXT = "vllm.forward_context", "set_forward_context"
"""The context in which vLLM runs its mixtures of experts."""


def differences(speculator: Any, input_batch: Any, forward_context: Any, group: Any = None) -> list[str]:
    """Return a line for each name that differs between vLLM and the plugin.

    Args:
        speculator: the object that vLLM made.
        input_batch: the class `InputBatch`.
        forward_context: the function `FORWARD_CONTEXT`.
        group: the group that `TENSOR_PARALLEL` returns. None for one rank.
    """
    found = v2_differences(speculator, input_batch)
    expected = ("attn_metadata", "vllm_config", "num_tokens")
    if (given := parameters(forward_context))[:3] != expected:
        found.append(f"{FORWARD_CONTEXT[1]} takes ({', '.join(given)}), expected ({', '.join(expected)}, ...)")
    return found + ([] if group is None else missing_members(group, ("device_group", "cpu_group", "all_reduce")))
