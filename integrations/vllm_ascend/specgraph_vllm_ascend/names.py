"""The names of vllm-ascend that the plugin uses, and their comparison with the installed release."""

from __future__ import annotations

from typing import Any

from specgraph_plugin.host_engine_names import missing_members, other_parameters, parameters
from specgraph_plugin.vllm.v2_names import v2_differences

CONFIG_MODULE = "vllm_ascend.ascend_config"
"""The module of `AscendConfig`, the part of `additional_config` that is vllm-ascend's."""

RUNNER_MODULE = "vllm_ascend.worker.model_runner_v1"
"""The module of the V1 model runner. It imports `get_spec_decode_method`, which makes the proposer."""

V2_RUNNER_MODULE = "vllm_ascend.worker.v2.model_runner"
"""The module of the V2 model runner. It imports `init_speculator`, which makes the speculator."""

MAKE = ("method", "vllm_config", "device", "runner")
"""The parameters of `get_spec_decode_method`."""
PROPOSE = (
    "target_token_ids", "target_positions", "target_hidden_states", "next_token_ids", "token_indices_to_sample",
    "common_attn_metadata",
)  # fmt: skip
"""The first parameters of a proposer's `_propose`."""
PROPOSE_OPTIONS = ("mm_embed_inputs", "scheduler_output")
"""Further parameters of `_propose` that the plugin reads."""
PROPOSER = ("vllm_config", "device", "runner", "model", "num_speculative_tokens", "kv_cache_gid", "max_model_len")
RUNNER = (
    "capture_model", "input_batch", "max_num_reqs", "max_num_tokens", "optimistic_seq_lens_cpu",
    "discard_request_indices", "num_discarded_requests", "use_async_scheduling", "valid_sampled_token_count_event",
    "valid_sampled_token_count_cpu",
)  # fmt: skip

V2_MAKE = ("vllm_config", "device")
"""The first parameters of the V2 model runner's `init_speculator`."""
V2_INPUT_BATCH = ("num_scheduled_tokens", "cu_num_logits_np")
"""Attributes of `AscendInputBatch`, besides those that any plugin reads of vLLM's class."""


def differences(make: Any, proposer: Any) -> list[str]:
    """Return a line for each function that differs between vllm-ascend and the plugin.

    Args:
        make: vllm-ascend's `get_spec_decode_method`.
        proposer: the object that it made.
    """
    methods = {
        "_propose": PROPOSE,
        "load_model": ("model",),
        "prepare_next_token_ids_padded": ("sampled_token_ids",),
        "get_model": (),
    }
    found = other_parameters(type(proposer), methods)
    if (given := parameters(make)) != MAKE:
        found.append(f"get_spec_decode_method takes ({', '.join(given)}), expected ({', '.join(MAKE)})")
    if lacking := [name for name in PROPOSE_OPTIONS if name not in parameters(type(proposer)._propose)]:
        found.append(f"{type(proposer).__name__}._propose takes no {', '.join(lacking)}")
    return found


def missing(proposer: Any) -> list[str]:
    """Return a line for each attribute of a made proposer and its runner that vllm-ascend lacks."""
    return missing_members(proposer, PROPOSER) + missing_members(proposer.runner, RUNNER)


def v2_runner_differences(make: Any, speculator: Any, input_batch: Any) -> list[str]:
    """Return a line for each name of the V2 model runner that differs between vllm-ascend and the plugin.

    Args:
        make: vllm-ascend's `init_speculator`.
        speculator: the object that it made.
        input_batch: the class `AscendInputBatch`.
    """
    found = v2_differences(speculator, input_batch) + missing_members(input_batch, V2_INPUT_BATCH)
    if (given := parameters(make))[: len(V2_MAKE)] != V2_MAKE:
        found.append(f"init_speculator takes ({', '.join(given)}), expected ({', '.join(V2_MAKE)}, ...)")
    return found
