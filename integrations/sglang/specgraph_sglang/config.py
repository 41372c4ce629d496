"""The configurations of SGLang that the plugin serves, checked before any device work."""

from __future__ import annotations

from typing import Any

ALGORITHMS = {"SPECGRAPH": "EAGLE3", "SPECGRAPH_EAGLE": "EAGLE"}
"""The plugin's values of --speculative-algorithm, each with SGLang's own algorithm that it replaces."""

DRAFT_VOCAB = "SPECGRAPH_DRAFT_VOCAB"
"""The environment variable with a file of the tokens that the drafter may draft: a token map of SGLang, JSON or `.npy`.
SGLang reads its own option for one kind of drafter, in one process, and knows no options of plugins."""


def unsupported_arguments(args: Any) -> str | None:
    """Return in one line why the plugin does not serve these arguments. None if it does.

    Args:
        args: the `ServerArgs` that SGLang passes to `validate_server_args`.
    """
    if args.speculative_draft_model_path is None:
        return "no --speculative-draft-model-path; it is an EAGLE drafter's folder, or the target's with its MTP module"
    if (topk := args.speculative_eagle_topk) != 1:  # without the option SGLang drafts trees for most targets
        return f"--speculative-eagle-topk {topk}; chains (1) are drafted"
    for name in ("pp_size", "dp_size", "attn_cp_size"):
        if (size := getattr(args, name, 1)) != 1:
            return f"--{name.replace('_', '-')} {size}; one GPU is served, or several with --tp-size"
    if (path := getattr(args, "speculative_token_map", None)) is not None:
        return f"--speculative-token-map; the plugin takes any drafter's from the environment: {DRAFT_VOCAB}={path}"
    is_mtp = args.speculative_draft_model_path == getattr(args, "model_path", "")
    if is_mtp and (reason := unsupported_experts(args)) is not None:
        return reason
    if args.kv_cache_dtype not in ("auto", "fp8_e4m3"):
        return f"--kv-cache-dtype {args.kv_cache_dtype}; the KV cache has the model's dtype, or fp8_e4m3"
    if args.disaggregation_mode != "null":
        return f"--disaggregation-mode {args.disaggregation_mode}"
    for name in (
        "speculative_adaptive", "speculative_use_rejection_sampling", "speculative_draft_window_size",
        "enable_multi_layer_eagle", "enable_two_batch_overlap", "enable_hierarchical_cache", "enable_memory_saver",
        "enable_unified_memory", "enable_pdmux", "enable_lora", "lora_paths", "disable_cuda_graph",
        "disable_decode_cuda_graph",
    ):  # fmt: skip
        if getattr(args, name, None):
            return f"--{name.replace('_', '-')}"
    return None


def unsupported_experts(args: Any) -> str | None:
    """Return in one line why the mixture of an MTP drafter cannot run in draft graphs. None if it can.

    It can if all ranks sum its output once, in SGLang's tensor parallel group.
    """
    for name in ("moe_a2a_backend", "speculative_moe_a2a_backend"):
        if (backend := getattr(args, name, None)) not in (None, "none"):
            return f"--{name.replace('_', '-')} {backend} with MTP; its experts are split by tensor parallel"
    if (size := getattr(args, "ep_size", 1)) not in (1, args.tp_size):
        return f"--ep-size {size} with MTP; its experts are split by, or dealt out to, all of --tp-size {args.tp_size}"
    return None
