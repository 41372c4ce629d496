"""Captures a target and its drafter, and reports the graphs and their cost (for `specgraph explain`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, get_args

from torch import Tensor

from specgraph.capture import ModelRunner, Resolution, resolve
from specgraph.capture.attend import PassMode
from specgraph.device import Capabilities, LoweringName, Progress
from specgraph.draft import DraftConfig
from specgraph.errors import UnsupportedError
from specgraph_run.decoder import SpeculativeDecoder
from specgraph_run.decoder.adaptive_k import best_k, expected_tokens
from specgraph_run.decoder.captures import report_captures
from specgraph_run.options import RoundTimes


def describe(decoder: SpeculativeDecoder, progress: Progress | None = None) -> dict[str, Any]:
    """Capture all graphs of a decoder, and return the report that `specgraph explain --json` writes."""
    platform, config, drafter, owners = decoder.platform, decoder.config, decoder.drafter, decoder.runners
    runner = drafter or decoder.target
    captured: list[dict[str, Any]] = []
    memory: dict[str, dict[str, int]] = {}
    counted = report_captures(list(owners.values()), progress)
    start = time.perf_counter()
    for name, owner in owners.items():
        before = platform.memory().reserved
        owner.capture(counted)
        platform.synchronize()
        captured += _captured(name, owner)
        memory[name] = {"graphs": platform.memory().reserved - before, **_sizes(owner.read_set())}
    resolution = runner.resolution
    capabilities, hosts = platform.capabilities, runner.attention.host_parameters
    return {
        "platform": platform.info.name,
        "device": platform.info.device_name,
        "attention": runner.attention.name,
        "host_parameters": list(hosts),
        "program": ", ".join(type(each).__name__ for each in drafter.draft_programs.values()) if drafter else None,
        "lowering": resolution.lowering,
        "prefill": resolution.prefill,
        "launches_per_propose": _launches(runner),
        "refusals": resolution.refusals,
        "lowerings": {name: _outcome(name, "auto", capabilities, hosts) for name in get_args(LoweringName)},
        "prefills": {mode: _outcome("auto", mode, capabilities, hosts) for mode in get_args(PassMode)},
        "num_speculative_tokens": {
            size: config.shape(size).num_speculative_tokens if drafter else 0 for size in config.sizes
        },
        "verified_drafts": decoder.options.verified_drafts,
        "tree": None if config.tree is None else asdict(config.tree),
        "tree_sizes": [size for size in config.sizes if config.shape(size).tree],
        "max_num_requests": config.max_num_requests,
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "prefill_sizes": list(config.prefill_rows),
        "eager": _eager(config, resolution),
        "captured": captured,
        "graph_count": sum(row["graphs"] for row in captured),
        "max_live_graphs": capabilities.max_live_graphs,
        "policy": [asdict(rule) for rule in capabilities.rules],
        "memory_bytes": memory,
        "capture_seconds": time.perf_counter() - start,
        "compile_seconds": sum(owner.compile_seconds for owner in owners.values()),
    }


def k_by_acceptance(times: RoundTimes) -> dict[int, dict[str, int]]:
    """Return the K of `-k auto`, by captured size, if a draft token's chance of acceptance is 0.3, 0.6 or 0.9."""
    by_rate = {rate: partial(expected_tokens, [rate] * max(map(max, times.values()))) for rate in (0.3, 0.6, 0.9)}
    return {size: {str(rate): best_k(tokens, row) for rate, tokens in by_rate.items()} for size, row in times.items()}


def _launches(runner: ModelRunner) -> dict[int, int]:
    """Return the graph launches per propose, by K. Attention between the graphs of `piecewise` is not counted."""
    graphs, result = runner.graphs, dict[int, int]()
    for program in runner.programs:
        for batch in program.batches() if program.phase == "propose" else ():
            keys = [launch.descriptor for launch in runner.launches_of(program, batch)]
            result[batch.num_speculative_tokens] = 0 if graphs is None else sum(map(graphs.graphs_of, keys))
    return dict(sorted(result.items()))


def _captured(model: str, runner: ModelRunner) -> list[dict[str, Any]]:
    if (graphs := runner.graphs) is None:
        return []
    return [
        {
            "model": model,
            "phase": batch.phase,
            "requests": batch.num_requests,
            "rows_per_request": batch.query_len,
            "rows": batch.num_tokens,
            "k": batch.num_speculative_tokens,
            "tree": batch.tree,
            "step": batch.step,
            "graphs": graphs.graphs_of(batch),
        }
        for batch in graphs.descriptors
    ]


def _outcome(decode: Any, prefill: Any, capabilities: Capabilities, host_parameters: tuple[str, ...]) -> str:
    """Return `yes` if the platform can do these lowerings. Otherwise return the reason why not."""
    try:
        resolve(decode, capabilities, host_parameters, prefill)
    except UnsupportedError as error:
        return str(error)
    return "yes"


def _eager(config: DraftConfig, resolution: Resolution) -> list[str]:
    """Return the passes that run without a graph, each with the reason."""
    lines: list[str] = []
    if resolution.decode == "eager":
        lines.append("verify and propose: decode eager")
    elif config.sizes[-1] < config.max_num_requests:
        lines.append(f"batches of more than {config.sizes[-1]} requests: no captured size holds them")
    if resolution.prefill == "eager":
        lines.append("prompts: prefill eager")
    for option, mode in (("decode", resolution.decode), ("prefill", resolution.prefill)):
        if mode == "piecewise":
            lines.append(f"attention in {option} passes: {option} piecewise")
    return lines


def _sizes(named: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the bytes of weights, KV caches, recurrent states and persistent buffers.

    A storage with two names counts once. A model without recurrent layers has no entry for states.
    """
    sizes = {"weights": 0, "kv_cache": 0, "states": 0, "buffers": 0}
    seen: set[int] = set()
    for name, tensor in named.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kind = name.partition(".")[0]
            sizes[kind if kind in sizes else "buffers"] += storage.nbytes()
    return sizes if sizes["states"] else {kind: size for kind, size in sizes.items() if kind != "states"}
