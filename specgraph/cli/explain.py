"""`specgraph explain`: what a configuration captures, what it costs, and why nothing stronger was chosen.

It captures for real, so what it prints is what runs; nothing is generated.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from specgraph.attention import AttentionBackend, choose_attention
from specgraph.benchmarking.shapes import random_head, shape_named
from specgraph.checkpoints import drafter_format, load_drafter, load_target
from specgraph.cli.json_output import write_json
from specgraph.decoding import SpeculativeDecoder, TargetRunner, allocate_caches
from specgraph.decoding.text import shipped_pair
from specgraph.drafting import DraftConfig, Drafter, resolve
from specgraph.drafting.config import Fallback, LoweringChoice, ModeChoice
from specgraph.errors import ConfigError, UnsupportedError
from specgraph.graphs import GraphMode, GraphRunner
from specgraph.platforms import LOWERINGS, Platform, open_platform

_COLUMNS = ("model", "phase", "requests", "rows_per_request", "rows", "k", "step", "graphs")


def explain(
    target: Annotated[Path | None, typer.Option(help="Folder of the target. The shipped pair by default.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Folder of the drafter.")] = None,
    num_modules: Annotated[
        int | None, typer.Option(help="MTP modules to use; 1 reuses the first. All if unsaid.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="A drafter by name, random weights, no target; see bench.")] = None,
    num_speculative_tokens: Annotated[int, typer.Option("-k", "--num-speculative-tokens", help="Draft tokens K.")] = 5,
    draft_schedule: Annotated[str | None, typer.Option(help="K by batch: 4:5,16:3 drafts 5 for up to 4.")] = None,
    max_num_requests: Annotated[int, typer.Option(help="The largest batch.")] = 8,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and output together.")] = None,
    sizes: Annotated[str | None, typer.Option(help="Request counts to capture, comma-separated.")] = None,
    prefill_sizes: Annotated[str | None, typer.Option(help="Rows of prompt passes, comma-separated.")] = None,
    mode: Annotated[ModeChoice, typer.Option(help="Which passes run from graphs.")] = "auto",
    lowering: Annotated[LoweringChoice, typer.Option(help="How the draft loop becomes graphs.")] = "auto",
    fallback: Annotated[Fallback, typer.Option(help="What to do with batches above every captured size.")] = "error",
    attention: Annotated[
        str, typer.Option(help="device, host (where lengths come from), or one of the platform's own.")
    ] = "auto",
    platform: Annotated[str | None, typer.Option(help="NAME or NAME:INDEX; see `specgraph platforms`.")] = None,
    json: Annotated[str | None, typer.Option(help="Write JSON to this file, or - for standard output.")] = None,
) -> None:
    """Show every size that is captured, by phase and model, graphs, memory, the lowering and each refusal's reason."""
    if shape is not None and (target, draft, num_modules) != (None, None, None):
        raise ConfigError("give --shape, or folders, not both")
    if (target is None) != (draft is None):
        raise ConfigError("give both the target's and the drafter's folder, or neither for the shipped pair")
    opened = open_platform(platform)
    backend = choose_attention(attention, opened)

    def config(limit: int) -> DraftConfig:
        return DraftConfig(
            num_speculative_tokens=num_speculative_tokens,
            max_num_requests=max_num_requests,
            max_model_len=max_model_len or limit,
            draft_schedule=_schedule(draft_schedule),
            capture_sizes=_numbers("sizes", sizes),
            prefill_sizes=_numbers("prefill-sizes", prefill_sizes),
            mode=mode,
            lowering=lowering,
            fallback=fallback,
        )

    with torch.inference_mode():
        if shape is not None:
            settings, models = config(4096), {"drafter": f"{shape}, random weights"}
            runner, drafter = None, _random_drafter(shape, opened, settings, backend)
        else:
            folders = (target, draft) if target is not None and draft is not None else shipped_pair()
            model = load_target(folders[0], opened.device, _dtype(opened), max_model_len)
            settings = config(model.max_model_len)
            models = {"target": f"{folders[0]}", "drafter": f"{folders[1]}: {drafter_format(folders[1])}"}
            head = load_drafter(folders[1], model, num_modules=num_modules)
            decoder = SpeculativeDecoder(model, head, opened, settings, attention=backend)
            assert decoder.drafter is not None
            runner, drafter = decoder.target, decoder.drafter
        report = {"models": models, **describe(opened, settings, runner, drafter)}
    console = Console(file=sys.stderr if json == "-" else sys.stdout)
    _show(console, report)
    if json is not None:
        write_json(report, json)
    for owner in (runner, drafter):
        if owner is not None:
            owner.close()


def describe(platform: Platform, config: DraftConfig, target: TargetRunner | None, drafter: Drafter) -> dict[str, Any]:
    """Capture target and drafter, and say what was captured and what it takes."""
    owners: dict[str, TargetRunner | Drafter] = {"drafter": drafter}
    if target is not None:
        owners = {"target": target, "drafter": drafter}
    captured: list[dict[str, Any]] = []
    memory: dict[str, dict[str, int]] = {}
    start = time.perf_counter()
    for name, owner in owners.items():
        before = platform.memory().reserved
        owner.capture()
        platform.synchronize()
        captured += _captured(name, (owner.prompts.runner, owner.runner))
        memory[name] = {"graphs": platform.memory().reserved - before, **_sizes(owner.read_set())}
    resolution = drafter.resolution
    capabilities, hosts = platform.capabilities, drafter.attention.host_parameters
    return {
        "platform": platform.info.name,
        "device": platform.info.device_name,
        "attention": drafter.attention.name,
        "host_parameters": list(hosts),
        "program": type(drafter.program).__name__,
        "mode": resolution.mode.name,
        "lowering": resolution.lowering,
        "launches_per_propose": _launches(drafter),
        "refusals": resolution.refusals,
        "lowerings": {name: _outcome(name, "auto", capabilities, hosts) for name in LOWERINGS},
        "modes": {mode.name: _outcome("auto", mode.name, capabilities, hosts) for mode in GraphMode},
        "num_speculative_tokens": {size: config.draft_tokens(size) for size in config.sizes},
        "max_num_requests": config.max_num_requests,
        "max_model_len": config.max_model_len,
        "prompt_sizes": list(config.prompt_sizes),
        "eager": _eager(config, resolution.mode),
        "captured": captured,
        "graph_count": sum(row["graphs"] for row in captured),
        "max_live_graphs": capabilities.max_live_graphs,
        "policy": [asdict(rule) for rule in capabilities.rules],
        "memory_bytes": memory,
        "capture_seconds": time.perf_counter() - start,
    }


def _launches(drafter: Drafter) -> dict[int, int]:
    """Graphs that a propose of K tokens replays, by K; attention between the graphs of a piecewise one not counted."""
    runner, result = drafter.runner, dict[int, int]()
    for batch in drafter.captures():
        each = drafter.launched(batch)
        result[batch.num_speculative_tokens] = 0 if runner is None else sum(runner.graphs_of(one) for one in each)
    return dict(sorted(result.items()))


def _captured(model: str, runners: Iterable[GraphRunner | None]) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "phase": batch.phase,
            "requests": batch.num_requests,
            "rows_per_request": batch.query_len,
            "rows": batch.num_tokens,
            "k": batch.num_speculative_tokens,
            "step": batch.step,
            "graphs": runner.graphs_of(batch),
        }
        for runner in runners
        if runner is not None
        for batch in runner.descriptors
    ]


def _outcome(lowering: str, mode: str, capabilities: Any, host_parameters: tuple[str, ...]) -> str:
    """`yes`, or why not."""
    try:
        resolve(lowering, capabilities, host_parameters, mode)
    except UnsupportedError as error:
        return str(error)
    return "yes"


def _eager(config: DraftConfig, mode: GraphMode) -> list[str]:
    """Passes that run without a graph, and why."""
    lines: list[str] = []
    if mode.decode == "eager":
        lines.append(f"verify and propose: mode {mode}")
    elif config.sizes[-1] < config.max_num_requests:
        lines.append(f"batches of more than {config.sizes[-1]} requests: no captured size holds them")
    if mode.prefill == "eager":
        lines.append(f"prompts: mode {mode}")
    if "piecewise" in (mode.decode, mode.prefill):
        piecewise = [what for what, how in (("decode", mode.decode), ("prefill", mode.prefill)) if how == "piecewise"]
        lines.append(f"attention in {' and '.join(piecewise)} passes: mode {mode}")
    return lines


def _sizes(named: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes of weights, KV caches and persistent buffers; memory that two names share counts once."""
    sizes = {"weights": 0, "kv_cache": 0, "buffers": 0}
    seen: set[int] = set()
    for name, tensor in named.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kind = name.partition(".")[0]
            sizes[kind if kind in sizes else "buffers"] += storage.nbytes()
    return sizes


def _random_drafter(shape: str, platform: Platform, config: DraftConfig, backend: AttentionBackend) -> Drafter:
    dtype = _dtype(platform) or torch.bfloat16
    head = random_head(shape_named(shape), platform.device, dtype, config.max_model_len)
    blocks = 1 + config.max_num_requests * -(-config.max_model_len // config.block_size)
    caches = allocate_caches(head.attention_layers, blocks, config.block_size, dtype, platform.device)
    return Drafter(head, caches, platform, config, attention=backend)


def _dtype(platform: Platform) -> torch.dtype | None:
    return torch.float32 if platform.device.type == "cpu" else None


def _numbers(name: str, text: str | None) -> Sequence[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{name} {text}: give whole numbers, comma-separated") from None


def _schedule(text: str | None) -> dict[int, int] | None:
    if text is None:
        return None
    try:
        return {int(limit): int(k) for limit, k in (part.split(":") for part in text.split(","))}
    except ValueError:
        raise ConfigError(f"--draft-schedule {text}: give REQUESTS:K, comma-separated, such as 4:5,16:3") from None


def _show(console: Console, report: Mapping[str, Any]) -> None:
    summary = Table(show_header=False)
    summary.add_row("platform", f"{report['platform']} ({report['device']})")
    for model, what in report.get("models", {}).items():
        summary.add_row(model, escape(what))
    hosts = ", ".join(report["host_parameters"])
    summary.add_row("attention", report["attention"] + (f", {hosts} from the host" if hosts else ""))
    summary.add_row("batches", f"up to {report['max_num_requests']} requests of {report['max_model_len']} tokens")
    by_k = ", ".join(f"{size}: {k}" for size, k in report["num_speculative_tokens"].items())
    same = len(set(report["num_speculative_tokens"].values())) == 1
    summary.add_row("draft tokens K", by_k.rpartition(" ")[2] if same else f"by requests: {by_k}")
    summary.add_row("draft program", report["program"])
    summary.add_row("mode", report["mode"])
    summary.add_row("lowering", report["lowering"])
    launches = ", ".join(f"{count} for K {k}" for k, count in report["launches_per_propose"].items())
    summary.add_row("launches a propose", launches)
    for what in ("lowerings", "modes"):
        for name, outcome in report[what].items():
            if outcome != "yes":
                summary.add_row(f"{name}: refused", outcome)
    for name, reason in report["refusals"].items():
        if report["lowerings"][name] == "yes":
            summary.add_row(f"{name}: not chosen", reason)
    for line in report["eager"]:
        summary.add_row("eager", line)
    limit = report["max_live_graphs"]
    summary.add_row("graphs", f"{report['graph_count']}" + (f" of at most {limit} a model" if limit else ""))
    summary.add_row("captured in", f"{report['capture_seconds']:.2f} s")
    for model, sizes in report["memory_bytes"].items():
        summary.add_row(f"{model} memory", ", ".join(f"{kind} {_mib(size)}" for kind, size in sizes.items()))
    console.print(summary)
    table = Table(*(column.replace("_", " ") for column in _COLUMNS))
    for row in report["captured"]:
        prompt, numbered = row["phase"] == "prefill", row["phase"] == "step"
        shown = {**row, "k": "" if prompt else row["k"], "step": row["step"] or "any" if numbered else ""}
        table.add_row(*(str(shown[column]) for column in _COLUMNS))
    if report["captured"]:
        console.print(table)
    if report["policy"]:
        policy = Table("policy", "decision", "reason", "seen in", show_lines=True)
        for rule in report["policy"]:
            policy.add_row(*(escape(rule[column]) for column in ("name", "decision", "reason", "source")))
        console.print(policy)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
