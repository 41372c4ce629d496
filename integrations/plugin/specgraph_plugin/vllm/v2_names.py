"""The names of vLLM's V2 model runner that `V2Speculator` uses, and their comparison with the installed release."""

from __future__ import annotations

from typing import Any

from specgraph_plugin.host_engine_names import missing_members, other_parameters

BATCH = "vllm.v1.worker.gpu.input_batch", "InputBatch"

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


def v2_differences(speculator: Any, input_batch: Any) -> list[str]:
    """Return a line for each name that differs between vLLM and the plugin.

    Args:
        speculator: the object that vLLM made.
        input_batch: the class `InputBatch`.
    """
    methods = {"propose": PROPOSE, "load_model": ("target_model",), "set_attn": (), "capture": ()}
    found = other_parameters(type(speculator), methods) + missing_members(speculator, SPECULATOR)
    return found + missing_members(input_batch, INPUT_BATCH)


def table_block_sizes(block_tables: Any) -> list[int]:
    """Return the tokens per entry of the block tables, by KV cache group.

    In vLLM 0.26 an entry is a kernel's block, a part of the KV cache manager's block. In 0.33 it is the whole block.
    """
    return getattr(block_tables, "kernel_block_sizes", None) or block_tables.block_sizes
