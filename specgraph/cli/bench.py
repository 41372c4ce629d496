"""`specgraph bench`: propose times per lowering, and tokens per second with and without drafting."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specgraph.cli.env import environment
from specgraph.cli.options import JsonOption, PlatformOption
from specgraph.cli.output import check_output, require_matplotlib, write_json
from specgraph.cli.waiting import doing
from specgraph.errors import ConfigError
from specgraph.options import KVCacheDtype, parse_acceptance

_TABLE = (
    "requests", "k", "tree", "context", "lowering", "sampled", "weights", "kv_cache_dtype", "device_us", "host_us",
    "launches", "syncs", "floor_us", "ratio",
)  # fmt: skip
_GENERATED = ("k", "lowering", "tokens_per_second", "mean_acceptance_length")
_ROUNDS = (
    "requests", "k", "tree", "lowering", "tokens_per_second", "round_ms", "kernel_floor_us", "mean_acceptance_length",
    "same_tokens",
)  # fmt: skip
_SETTINGS = ("requests", "k", "tree", "context", "sampled")
"""Columns that go into the title of a table where all rows have the same."""


def bench(
    platform: PlatformOption = None,
    shape: Annotated[
        str | None, typer.Option(help="A drafter by name, with random weights; an unknown name lists them.")
    ] = None,
    requests: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,4",
    k: Annotated[str, typer.Option("-k", help="Draft tokens per propose, comma-separated.")] = "5",
    context: Annotated[int, typer.Option(min=2, help="Tokens per request.")] = 256,
    lowerings: Annotated[str, typer.Option(help="Lowerings to time, comma-separated.")] = "eager,step,merged",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: float32 on cpu, else bfloat16.")
    ] = None,
    sampled: Annotated[bool, typer.Option(help="Also time drafts sampled at temperature 1.")] = False,
    weights: Annotated[
        str, typer.Option(help="Also time the head in FP8: fp8 (a scale per row) or fp8-blocks (per 128 columns).")
    ] = "plain",
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8: also time it over KV caches in e4m3.")] = "auto",
    torch_ops: Annotated[bool, typer.Option(help="Also time eager with plain torch ops.")] = True,
    target: Annotated[
        str | None, typer.Option(help="Also time whole rounds with a target by name, with random weights.")
    ] = None,
    acceptance: Annotated[
        str, typer.Option(help="In whole rounds, the chance that a draft token is accepted; or a share per position.")
    ] = "0.7",
    tree_acceptance: Annotated[
        str | None, typer.Option(help="The same for draft trees. Default: that of --acceptance.")
    ] = None,
    speculative_num_steps: Annotated[
        int | None, typer.Option(help="Also time draft trees, one of -k steps deep; give all three.")
    ] = None,
    speculative_eagle_topk: Annotated[int | None, typer.Option(help="Tokens that follow each node of a tree.")] = None,
    speculative_num_draft_tokens: Annotated[
        int | None, typer.Option(help="Rows per request in the verify of a tree.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls per lowering; the median counts.")] = 50,
    decoding: Annotated[bool, typer.Option(help="Also time text generation with the shipped pair.")] = True,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of the propose times.")] = None,
) -> None:
    """Time one propose in every lowering, in one run; on an accelerator also against the floor."""
    ways: Any = tuple(lowerings.split(","))
    proposes = tuple(way for way in ways if way != "round")  # which has no propose of its own to time
    counts, steps = _numbers("--requests", requests), _numbers("-k", k)
    shares = _acceptance("--acceptance", acceptance)
    tree_shares = None if tree_acceptance is None else _acceptance("--tree-acceptance", tree_acceptance)
    check_output("--json", json)
    check_output("--plot", plot)
    if plot is not None:
        require_matplotlib()
    import torch

    from specgraph.device import open_platform
    from specgraph.engine.blocks import cache_dtype
    from specgraph.engine.load import draft_tree
    from specgraph.options import EngineOptions, dtype_named
    from specgraph.tools.decoding import bench_decoding
    from specgraph.tools.floor import measure_rates
    from specgraph.tools.plot import plot_rows
    from specgraph.tools.propose import BenchCase, bench_propose
    from specgraph.tools.rounds import RoundsCase, bench_rounds
    from specgraph.tools.shapes import shape_named, weights_named

    tree = draft_tree(
        EngineOptions(
            speculative_num_steps=speculative_num_steps,
            speculative_eagle_topk=speculative_eagle_topk,
            speculative_num_draft_tokens=speculative_num_draft_tokens,
        )
    )
    if tree is not None and tree.num_steps not in steps:
        raise ConfigError(f"-k {k}: trees of {tree.num_steps} steps are timed beside chains of as many; add it to -k")
    opened = open_platform(platform)
    accelerator = opened.device.type != "cpu"
    shape = shape or ("eagle3-llama3-8b" if accelerator else "eagle3-tiny-python")
    shape_named(shape)
    stored, cached = weights_named(weights), cast(KVCacheDtype, kv_cache_dtype)
    cache_dtype(cached, torch.float32)
    chosen = dtype_named(dtype) or (torch.bfloat16 if accelerator else torch.float32)
    rows: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    generated: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        **environment(opened), "command": shlex.join(["specgraph", *sys.argv[1:]]), "dtype": str(chosen), "rows": rows
    }  # fmt: skip
    interrupted = False
    try:
        with doing() as now:
            now("measuring the device's bandwidth")
            rates = measure_rates(opened, chosen) if accelerator and not opened.info.simulated else None
            if rates is not None:
                report["bandwidth_bytes_per_second"] = rates.bytes_per_second
                report["matmul_flops_per_second"] = rates.flops_per_second
            for count in counts if proposes else ():
                for each in steps:
                    now(f"propose: {count} requests, K {each}")
                    case = BenchCase(
                        shape=shape, requests=count, k=each, context=context, lowerings=proposes, sampled=sampled,
                        weights=stored, kv_cache_dtype=cached, torch_ops=torch_ops, repeats=repeats,
                        tree=tree if tree is not None and tree.num_steps == each else None,
                    )  # fmt: skip
                    rows += bench_propose(opened, case, dtype=chosen, rates=rates)
            for count in counts if target is not None else ():
                now(f"whole rounds: {count} requests")
                rounds = RoundsCase(
                    target=str(target), shape=shape, requests=count, k=steps[0] if tree is None else tree.num_steps,
                    context=context, acceptance=shares, tree=tree,
                    tree_acceptance=tree_shares, lowerings=ways,
                )  # fmt: skip
                whole += bench_rounds(opened, rounds, dtype=chosen, rates=rates)
            if decoding:
                now("generation with the shipped pair")
                generated += bench_decoding(opened, k=steps[0], lowerings=ways)
    except KeyboardInterrupt:
        interrupted = True
    report |= {name: found for name, found in (("rounds", whole), ("decoding", generated)) if found}
    console = Console(file=sys.stderr if json == "-" else sys.stdout)
    if (tiles := opened.capabilities.notes.get("tiles")) is not None:
        report["tiles"] = tiles.reason
        console.print(f"tiles of linears: {tiles.reason}")
    _show_report(console, report, shape, target, f"{opened.info.device_name}, {opened.info.device_kind}")
    if json is not None:
        write_json(report | ({"interrupted": True} if interrupted else {}), json)
    if plot is not None and rows:
        greedy = [row for row in rows if not row["sampled"]]
        plot_rows(greedy, f"{shape}, context {context}, {opened.info.device_name}", plot)
    if interrupted:
        print("specgraph: interrupted; these are the figures so far", file=sys.stderr)
        raise typer.Exit(130)


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{option} {text}: give whole numbers of at least 1, comma-separated")
    return numbers


def _acceptance(option: str, text: str) -> Any:
    try:
        return parse_acceptance(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def _show_report(console: Console, report: dict[str, Any], shape: str, target: str | None, device: str) -> None:
    rows = report["rows"]
    _show(console, f"propose, {shape}, {device}", rows, _TABLE)
    issued = [{**row, **row["issued"]} for row in rows if "issued" in row]
    names = dict.fromkeys(name for row in rows for name in row.get("issued", {}))
    columns = ("requests", "k", "lowering", *names, "propose_host_us")
    _show(console, f"issued per propose, accepted counts on the device only, {device}", issued, columns)
    _show(console, f"whole rounds, {target} and {shape}, {device}", report.get("rounds", []), _ROUNDS)
    generated = report.get("decoding", [])
    _show(console, f"generation, shipped pair, one request at a time, {device}", generated, _GENERATED)


def _show(console: Console, title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    if not rows:
        return
    present = [name for name in columns if any(name in row for row in rows)]
    same = [name for name in _SETTINGS if name in present and len({str(row.get(name)) for row in rows}) == 1]
    about = "".join(f", {name} {rows[0].get(name)}" for name in same)
    table = Table(title=title + about, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in present:
        cells = [str(row.get(name, "")) for row in rows]
        if name not in same:  # a narrow terminal folds words, no figure
            width = None if name == "lowering" else max(map(len, cells))
            table.add_column(name.replace("_", " "), overflow="fold", min_width=width)
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in present if name not in same))
    console.print(table)
    for row in rows:
        if "refused" in row:
            console.print(f"{row['lowering']}, {row['requests']} requests: refused: {row['refused']}", markup=False)
