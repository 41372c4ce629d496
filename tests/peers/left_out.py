"""Tests of others that are not run here; README.md beside this file says why. Each plugin takes the hook from here."""

from __future__ import annotations

import pytest

LEFT_OUT = {
    # torch_npu
    "test_fia_out_4in1_with_graph",
    "test_paged_attention_aclgraph_update",
    # vLLM
    "test_eagle_step_slot_mapping_kernel_exceeds_max",
    "test_sample_recovered_tokens",
    "test_sample_recovered_tokens_uses_fp64_exponential_race_when_requested",
    "test_sample_recovered_tokens_vocab_boundary",
    "test_fly_greedy_rescues_mismatch_after_native_acceptance_window",
    "test_fly_requires_full_lookahead_and_passes_entropy_gate",
    "test_fly_does_not_override_target_constraint",
    "test_fly_target_only_sampling_uses_mapped_target_ids",
    "test_fly_probabilistic_draft_sampling_uses_probability_ratio",
    "test_fly_mixed_greedy_and_random_batch",
    # torch
    "test_graph_debugdump",
    "test_graph_error",
    "test_graphsafe_set_get_rng_state",
    "test_memory_stats_of_multiple_generators_and_graphs",
    "test_custom_pin_memory_device_argument_asynccpu",
    "test_custom_pin_memory_device_varargs_asynccpu",
    "test_stream_compare_with_non_stream_asynccpu",
}

LEFT_OUT_ON_CPU = {
    "test_cuda_graph_allocator_propagates_stream",
    "test_graph_concurrent_replay",
    "test_graph_cudnn_dropout",
    "test_graph_make_graphed_callables_parameterless_nograd_module_with_amp_cache_enabled_allow_unused_input",
    "test_graph_make_graphed_callables_with_amp_cache_enabled_allow_unused_input",
    "test_graph_memory_stats_and_use_result_after_destroy_graph",
    "test_graph_optims_with_explicitly_capturable_param_groups",
    "test_graph_warn_if_has_zero_nodes",
    "test_repeat_graph_capture_cublas_workspace_memory",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that `LEFT_OUT` names."""
    for item in items:
        if item.name.partition("[")[0] in LEFT_OUT:
            item.add_marker(pytest.mark.skip(reason="left out, see tests/peers/README.md"))
