"""`specgraph bench`: propose times per lowering, and tokens per second of whole rounds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specgraph.config import LoweringChoice
from specgraph.errors import ConfigError
from specgraph.validation import MOST_REQUESTS, check
from specgraph_run.cli.env import environment
from specgraph_run.cli.options import TREES, JsonOption, PlatformOption, parse_numbers, with_generator_options
from specgraph_run.cli.output import check_output, exit_interrupted, text_output, write_json
from specgraph_run.cli.waiting import announce
from specgraph_run.options import DrafterShape, RandomTarget, Share, StoredWeights, parse_acceptance

if TYPE_CHECKING:
    import torch

    from specgraph.device import Platform
    from specgraph_run.tools.propose import BenchCase

_TABLE = (
    "requests", "k", "context", "lowering", "device_us", "device_us_least", "device_us_most", "host_us", "launches",
    "floor_us", "ratio",
)  # fmt: skip
_ROUNDS = (
    "requests", "k", "lowering", "tokens_per_second", "tokens_per_second_least", "tokens_per_second_most", "round_ms",
    "kernel_floor_us", "mean_acceptance_length", "same_tokens",
)  # fmt: skip
_SETTINGS = ("requests", "k", "context")
"""Columns that go into a table's title if all its rows have the same value."""


@with_generator_options(only=("dtype", "kv_cache_dtype", *TREES))
def bench(
    platform: PlatformOption = None,
    shape: Annotated[
        DrafterShape | None,
        typer.Option(metavar="<name>", help="A drafter with random weights; an unknown name lists them."),
    ] = None,
    requests: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,4",
    k: Annotated[str, typer.Option("-k", help="Draft tokens per propose, comma-separated.")] = "5",
    context: Annotated[int, typer.Option(min=2, max=1 << 20, help="Tokens per request.")] = 256,
    lowerings: Annotated[str, typer.Option(help="Lowerings to time, comma-separated.")] = "eager,step,merged",
    sampled: Annotated[bool, typer.Option(help="Sample the drafts at temperature 1.")] = False,
    weights: Annotated[
        StoredWeights, typer.Option(help="The head's: fp8 has a scale per row, fp8-blocks one per 128 columns.")
    ] = "plain",
    torch_ops: Annotated[bool, typer.Option(help="Also time eager with plain torch ops.")] = True,
    target: Annotated[
        RandomTarget | None, typer.Option(help="Also time whole rounds with a target with random weights.")
    ] = None,
    acceptance: Annotated[
        str, typer.Option(help="In whole rounds, the chance that a draft token is accepted; or a share per position.")
    ] = "0.7",
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls per lowering; the median counts.")] = 50,
    options: Any = None,
    json: JsonOption = None,
) -> None:
    """Time one propose in every lowering, with random weights of a model's shape; `generate` times your own folders.

    On an accelerator, each time is also compared with the floor.

    --sampled, --weights and --kv-cache-dtype apply to proposes only: whole rounds are greedy, in the models' dtype.
    """
    ways: Any = check("--lowerings", lowerings.split(","), Sequence[LoweringChoice])
    counts, steps = parse_numbers("--requests", requests, MOST_REQUESTS), parse_numbers("-k", k, 63)
    if (depth := options.speculative_num_steps) is not None and steps != [depth]:
        raise ConfigError(f"-k {k}: trees of {depth} steps have K {depth}: give -k {depth}")
    try:
        shares: Any = check("--acceptance", parse_acceptance(acceptance), Share | Sequence[Share])
    except ValueError as error:
        raise ConfigError(f"--acceptance {acceptance}: {error}") from None
    check_output("--json", json)
    announce("loading torch")
    import torch
    from specgraph_models.names import dtype_named

    from specgraph.device import open_platform
    from specgraph_run.tools.propose import BenchCase

    opened = open_platform(platform)
    accelerator = opened.device.type != "cpu"
    shape = shape or ("eagle3-llama3-8b" if accelerator else "eagle3-tiny-python")
    chosen = dtype_named(options.dtype) or (torch.bfloat16 if accelerator else torch.float32)
    cases = [
        BenchCase(
            shape=shape, requests=count, k=each, context=context, lowerings=ways, sampled=sampled, weights=weights,
            kv_cache_dtype=options.kv_cache_dtype, torch_ops=torch_ops, repeats=repeats, tree=options.draft_tree,
        )
        for count in counts for each in steps
    ]  # fmt: skip
    report: dict[str, Any] = {**environment(opened), "dtype": str(chosen), "rows": []}
    try:
        _measure(opened, chosen, cases, target, shares, report)
    except KeyboardInterrupt:
        report["interrupted"] = True
    if (tiles := opened.capabilities.notes.get("tiles")) is not None:
        report["tiles"] = tiles.reason
    write_json(report, json)
    _show_report(Console(file=text_output(json)), report, shape, target)
    if "interrupted" in report:
        exit_interrupted()


def _measure(
    platform: Platform,
    dtype: torch.dtype,
    cases: Sequence[BenchCase],
    target: str | None,
    acceptance: float | tuple[float, ...],
    report: dict[str, Any],
) -> None:
    """Time all cases, and add the rows of each to `report` as soon as it is done."""
    from specgraph_run.tools.floor import measure_rates
    from specgraph_run.tools.propose import bench_propose
    from specgraph_run.tools.rounds import bench_rounds

    has_floor = platform.device.type != "cpu" and not platform.info.simulated
    rates = measure_rates(platform, dtype) if has_floor else None
    if rates is not None:
        report["bandwidth_bytes_per_second"] = rates.bytes_per_second
        report["matmul_flops_per_second"] = rates.flops_per_second
    for case in cases:
        print(f"propose: {case.requests} requests, K {case.k}", file=sys.stderr)
        report["rows"] += bench_propose(platform, case, dtype=dtype, rates=rates)
    for case in cases if target is not None else ():
        print(f"whole rounds: {case.requests} requests, K {case.k}", file=sys.stderr)
        rows = bench_rounds(platform, case, str(target), acceptance, dtype=dtype, rates=rates)
        report["rounds"] = report.get("rounds", []) + rows


def _show_report(console: Console, report: dict[str, Any], shape: str, target: str | None) -> None:
    device = f"{report['device']}, {report['device_kind']}"
    if "tiles" in report:
        console.print(f"tiles of linears: {report['tiles']}")
    rows = report["rows"]
    _show(console, f"propose, {shape}, {device}", rows, _TABLE)
    _show_spread(console, rows, "device_us", "us")
    issued = [{**row, **row["issued"]} for row in rows if "issued" in row]
    names = dict.fromkeys(name for row in rows for name in row.get("issued", {}))
    columns = ("requests", "k", "lowering", *names, "propose_host_us")
    _show(console, f"issued per propose, accepted counts on the device only, {device}", issued, columns)
    _show(console, f"whole rounds, {target} and {shape}, {device}", report.get("rounds", []), _ROUNDS)
    _show_spread(console, report.get("rounds", []), "tokens_per_second", "tokens/s")


def _show_spread(console: Console, rows: list[dict[str, Any]], figure: str, unit: str) -> None:
    """Print a line for two neighbouring rows of one case if their medians differ by less than the wider spread."""
    timed = [row for row in rows if f"{figure}_least" in row]
    for one, other in pairwise(timed):
        if all(one[name] == other[name] for name in _SETTINGS):
            apart = abs(one[figure] - other[figure])
            spread = max(row[f"{figure}_most"] - row[f"{figure}_least"] for row in (one, other))
            if apart < spread:
                both = f"{one['requests']} requests: {one['lowering']} and {other['lowering']}"
                line = f"{both} are {apart:.1f} {unit} apart, less than the spread of either, {spread:.1f}"
                console.print(line, soft_wrap=True)


def _show(console: Console, title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    if not rows:
        return
    present = [name for name in columns if any(name in row for row in rows)]
    same = [name for name in _SETTINGS if name in present and len({str(row.get(name)) for row in rows}) == 1]
    about = "".join(f", {name} {rows[0].get(name)}" for name in same)
    table = Table(title=title + about, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in present:
        cells = [str(row.get(name, "")) for row in rows]
        if name not in same:  # a narrow terminal may fold words, but not figures
            width = None if name == "lowering" else max(map(len, cells))
            table.add_column(name.replace("_", " "), overflow="fold", min_width=width)
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in present if name not in same))
    console.print(table)
    for row in rows:
        if "refused" in row:
            console.print(f"{row['lowering']}, {row['requests']} requests: refused: {row['refused']}", markup=False)
