"""The names of SGLang that the plugin uses, and their comparison with the installed release."""

from __future__ import annotations

from typing import Any

from specgraph_plugin.host_engine_names import missing_members, other_parameters

WORKER_MODULE = "sglang.srt.speculative.eagle_worker_v2"
SIZING_MODULE = "sglang.srt.mem_cache.allocation_sizing"
RESERVE, ROW_HEADROOM = "get_alloc_reserve_per_decode", "get_req_to_token_extra_context_len"
"""The functions of `SIZING_MODULE` that the plugin hooks."""

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
"""The class that answers `/server_info` and `/set_internal_state`. The plugin hooks both answers; drafting needs no
hook."""

TENSOR_PARALLEL = "sglang.srt.distributed.parallel_state", "get_tp_group"
"""A function that returns the group of ranks that split the model, with its process groups."""

TAKEN = (
    "EagleDraftInput",
    "build_eagle_verify_input",
    "get_batch_sizes_to_capture",
    "_eagle_prefill_tail_tokens",
)
"""The names of `WORKER_MODULE` that the draft worker calls."""
DRAFT_WORKER = {
    "_capture_cuda_graphs": (),
    "draft": ("batch",),
    "_draft_extend_for_prefill": ("batch", "target_hidden_states", "next_token_ids", "mm_input_embeds"),
    "_draft_extend_for_decode": ("batch", "batch_result"),
}
VERIFY_INPUT = ("batch", "draft_input", "parent_list", "top_scores_index", "draft_tokens", "draft_probs")
BATCH = (
    "forward_mode", "req_pool_indices", "req_pool_indices_cpu", "seq_lens", "spec_info", "input_ids", "prefix_lens",
    "extend_lens",
)  # fmt: skip
DRAFT_INPUT = (
    "topk_p", "topk_index", "hidden_states", "bonus_tokens", "num_tokens_per_req", "num_tokens_for_logprob_per_req",
)  # fmt: skip
READ_DONE = ("shared_read_done_event", "war_fastpath_read_done_event")
"""The attributes of the draft runner for an event, from 0.5.23 on and before it. SGLang's scheduler waits for the event
before it overwrites tensors that a pass reads. Without either attribute it waits for the whole pass."""


def differences(worker: Any, sizing: Any) -> list[str]:
    """Return a line for each name that differs between SGLang and the plugin.

    Args:
        worker, sizing: the modules `WORKER_MODULE` and `SIZING_MODULE`.
    """
    found = other_parameters(sizing, {RESERVE: (), ROW_HEADROOM: ()})
    found += [f"{WORKER_MODULE}.{name} is missing" for name in TAKEN if not hasattr(worker, name)]
    if found:
        return found
    found += other_parameters(worker.EagleDraftWorker, DRAFT_WORKER)
    found += other_parameters(worker, {"build_eagle_verify_input": VERIFY_INPUT})
    found += missing_members(worker.ScheduleBatch, BATCH) + missing_members(worker.EagleDraftInput, DRAFT_INPUT)
    return found
