"""The names of vLLM that the plugin uses, and their comparison with the installed release."""

from __future__ import annotations

from typing import Any

from specgraph_plugin.host_engine_names import missing_members, other_parameters, parameters

RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
PLATFORMS = "vllm.platforms"
"""The module with `current_platform`, which has a `device_type`."""
CONFIG = "vllm.config", "VllmConfig"
"""The class with the property `use_v2_model_runner`."""
BATCH = "vllm.v1.worker.gpu.input_batch", "InputBatch"
TENSOR_PARALLEL = "vllm.distributed.parallel_state", "get_tp_group"
"""A function that returns the group of ranks that split the model. The group has process groups and an all-reduce."""
FORWARD_CONTEXT = "vllm.forward_context", "set_forward_context"
"""The context in which vLLM runs its mixtures of experts."""

PROPOSE = (
    "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_sampled",
    "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds",
)  # fmt: skip
"""The first parameters of a speculator's `propose`."""
SPECULATOR = (
    "vllm_config", "device", "num_speculative_steps", "max_num_reqs", "max_num_tokens", "max_model_len",
    "draft_logits", "idx_mapping",
)  # fmt: skip
INPUT_BATCH = (
    "num_reqs", "num_tokens", "idx_mapping", "idx_mapping_np", "input_ids", "positions", "is_prefilling_np",
    "prefill_len_np", "query_start_loc_np", "num_computed_tokens_np", "logits_indices", "cu_num_logits",
    "has_structured_output_reqs",
)  # fmt: skip


def differences(speculator: Any, input_batch: Any, forward_context: Any, group: Any = None) -> list[str]:
    """Return a line for each name that differs between vLLM and the plugin.

    Args:
        speculator: the object that vLLM made.
        input_batch: the class `InputBatch`.
        forward_context: the function `FORWARD_CONTEXT`.
        group: the group that `TENSOR_PARALLEL` returns. None for one rank.
    """
    methods = {"propose": PROPOSE, "load_model": ("target_model",), "set_attn": (), "capture": ()}
    found = other_parameters(type(speculator), methods) + missing_members(speculator, SPECULATOR)
    expected = ("attn_metadata", "vllm_config", "num_tokens")
    if (given := parameters(forward_context))[:3] != expected:
        found.append(f"{FORWARD_CONTEXT[1]} takes ({', '.join(given)}), expected ({', '.join(expected)}, ...)")
    found += [] if group is None else missing_members(group, ("device_group", "cpu_group", "all_reduce"))
    return found + missing_members(input_batch, INPUT_BATCH)


def table_block_sizes(block_tables: Any) -> list[int]:
    """Return the tokens per entry of the block tables, by KV cache group.

    In vLLM 0.26 an entry is a kernel's block, a part of the KV cache manager's block. In 0.33 it is the whole block.
    """
    return getattr(block_tables, "kernel_block_sizes", None) or block_tables.block_sizes
