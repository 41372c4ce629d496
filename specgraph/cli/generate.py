"""`specgraph generate`: text from a target and its drafter, accepted draft tokens marked."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specgraph.cli.env import choose_threads
from specgraph.cli.options import DraftOption, JsonOption, PlatformOption, TargetOption, with_engine_options
from specgraph.cli.output import check_output, require_matplotlib, write_json
from specgraph.cli.prompts import Prompt, read_prompts
from specgraph.cli.streaming import LEGEND, Result, gather_results, show_texts
from specgraph.cli.waiting import waiting
from specgraph.errors import ConfigError
from specgraph.options import EngineOptions, check_num_sequences

if TYPE_CHECKING:
    from specgraph.engine.text import TextGenerator

_OF_A_ROUND = ("verify", "propose", "round")
"""Phases of the programs that a round consists of."""
_MOST_TOGETHER = 8
"""Prompts that run together where --max-num-requests is not given: every size up to it is captured."""


@with_engine_options(without=("sampled", "max_num_requests", "sampling_parameters", "logprobs"))
def generate(
    target: TargetOption = None,
    draft: DraftOption = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt; - reads it from standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file; - is standard input.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines: {"prompt": TEXT}, each with max_tokens, temperature, top_p ... if wanted.'),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the target's chat template.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; repeatable.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt, at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Sampling repeats for the same seed.")] = 0,
    n: Annotated[
        int, typer.Option("-n", "--n", help="Sequences per prompt, with seeds seed, seed + 1 ...; needs a temperature.")
    ] = 1,
    top_k: Annotated[int, typer.Option(help="Sample from this many most likely tokens; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the fewest most likely tokens that together have this probability.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Sample from tokens with at least this share of the largest probability.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Divides positive logits of tokens in prompt and output, multiplies negative ones.")
    ] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Taken off the logits of tokens in the output.")] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Taken off a token's logit for each time that the output has it.")
    ] = 0.0,
    max_num_requests: Annotated[
        int | None, typer.Option(min=1, help="Prompts that run together. Default: all, at most 8.")
    ] = None,
    compare: Annotated[
        bool, typer.Option(help="Also decode without drafting, and show both speeds; not with --data-parallel.")
    ] = True,
    options: Any = None,
    platform: PlatformOption = None,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of the acceptance per position.")] = None,
) -> None:
    """Generate text with speculative decoding; text from accepted draft tokens is green and underlined."""
    check_output("--json", json)
    _check_processes(options)
    rank, data = int(os.environ.get("RANK", "0")), options.data_parallel
    if rank:
        json = plot = None  # the first rank writes
    check_output("--plot", plot)
    if plot is not None:
        require_matplotlib()
    settings = Prompt(
        prompt="", max_tokens=max_tokens, temperature=temperature, seed=seed, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        n=n,
    )  # fmt: skip
    asked = read_prompts(prompt, prompt_file, prompts, settings)
    for each in asked:
        check_num_sequences(each.n, each.temperature)
    if not all(stop or ()):
        raise ConfigError("--stop: a stop string is empty")
    console = Console(file=sys.stderr if json == "-" else sys.stdout, highlight=False, quiet=rank > 0)
    with waiting() as captured:
        from specgraph.device import open_platform
        from specgraph.engine.load import load_generator, shipped_pair

        opened = open_platform(platform)
        threads = choose_threads(opened, target or shipped_pair()[0])
        chosen = replace(
            options,
            sampled=any(each.temperature > 0 for each in asked),
            sampling_parameters=any(each.has_parameters for each in asked),
            max_num_requests=max_num_requests or min(sum(each.n for each in asked), _MOST_TOGETHER),
        )
        generator = load_generator(target, draft, platform=opened, progress=captured, options=chosen)
        groups = [generator.requests(each.prompt, chat=chat, **each.settings) for each in asked]
        requests = [request for group in groups for request in group]
        for request in requests:
            generator.decoder.check(request)
    console.print(f"[dim]{generator.description}{threads}[/]")
    if console.is_terminal and not console.is_dumb_terminal:  # which shows no styles
        console.print(LEGEND)
    folders = {"target": str(target or "tiny-python"), "draft": str(draft or "eagle3")}
    results: list[Result] = []
    earlier = _launches_of_rounds(generator)  # -k auto has timed some
    interrupted, start, seconds = False, time.perf_counter(), 0.0
    own = slice(rank // options.tensor_parallel, None, data)  # of a data parallel rank: every n-th request
    try:
        try:
            if data > 1:
                groups = [[request] for request in requests[own]]
            show_texts(generator, groups, stop or (), console, results)
        finally:
            seconds = time.perf_counter() - start
        results = gather_results(generator, requests, results, console)
        plain = None
        if compare and data == 1:
            chosen = replace(chosen, synthetic_acceptance=None)
            with waiting() as captured:
                alone = load_generator(
                    target, draft, platform=opened, speculate=False, progress=captured, options=chosen
                )
            plain = _plain(alone, asked, chat)
    except KeyboardInterrupt:
        interrupted, plain = True, None
        console.print()
        if len(results) < len(requests):  # those of other data parallel ranks were not gathered
            known = dict(zip(range(len(requests))[own], results, strict=False))
            results = [known.get(i, Result()) for i in range(len(requests))]
    launches = _launches_of_rounds(generator) - earlier
    report = _report(generator, asked, results, launches, seconds, plain, folders)
    _table(console, report, generator)
    if json is not None:
        write_json(report | ({"interrupted": True} if interrupted else {}), json)
    if plot is not None and report["mean_acceptance_length"] is not None:
        from specgraph.tools.plot import plot_acceptance

        pair = f"{folders['target']}, {folders['draft']}, K = {report['num_speculative_tokens']}"
        plot_acceptance(report["acceptance_per_position"], report["mean_acceptance_length"], pair, plot)
    generator.close()
    if interrupted:
        print("specgraph: interrupted; these are the figures so far", file=sys.stderr)
        raise typer.Exit(130)


def _check_processes(options: EngineOptions) -> None:
    started, data = int(os.environ.get("WORLD_SIZE", "1")), options.data_parallel
    if started != (size := options.tensor_parallel * data):
        processes = f"{started} process{'es were' if started > 1 else ' was'} started"
        given = f"--tensor-parallel is {options.tensor_parallel}" + (f", --data-parallel {data}" if data > 1 else "")
        how = f"torchrun --nproc-per-node {size} -m specgraph generate" if size > 1 else f"--tensor-parallel {started}"
        raise ConfigError(f"{processes}, and {given}: use {how}")


def _plain(generator: TextGenerator, prompts: list[Prompt], chat: bool) -> float:
    """Tokens per second of the same prompts without drafting."""
    start = time.perf_counter()
    results = generator.generate(
        [request for each in prompts for request in generator.requests(each.prompt, chat=chat, **each.settings)]
    )
    seconds = time.perf_counter() - start
    generator.close()
    return sum(len(result.token_ids) for result in results) / seconds


def _report(
    generator: TextGenerator,
    asked: list[Prompt],
    results: list[Result],
    launches_of_rounds: int,
    seconds: float,
    plain: float | None,
    folders: dict[str, str],
) -> dict[str, Any]:
    from specgraph import __version__

    drafter, info = generator.decoder.drafter, generator.platform.info
    assert drafter is not None
    accepted = [count for result in results for count in result.accepted]
    positions = drafter.config.num_speculative_tokens
    tokens = sum(len(result.tokens) for result in results)
    rest, rows = iter(results), list[dict[str, Any]]()
    for prompt in asked:
        own = [_row(result) for result in islice(rest, prompt.n)]
        if prompt.n > 1:
            own = [{"seed": prompt.seed + i, **each} for i, each in enumerate(own)]
            own = [{"num_tokens": sum(each["num_tokens"] for each in own), "sequences": own}]
        rows.append(asdict(prompt) | own[0])
    per_round = launches_of_rounds / max(generator.decoder.rounds.num_rounds, 1)
    per_propose = drafter.launches["propose"] / drafter.num_proposes if drafter.num_proposes else per_round
    return {
        **(rows[0] if len(rows) == 1 else {"results": rows, "num_tokens": tokens}),
        "num_speculative_tokens": positions,
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted) if accepted else None,
        "acceptance_per_position": [
            sum(count > place for count in accepted) / len(accepted) if accepted else None for place in range(positions)
        ],
        "rounds": len(accepted),
        "drafts_by_k": generator.decoder.metrics.drafts_by_k,
        "rows_without_block": drafter.rows_without_block,
        "max_num_requests": generator.decoder.config.max_num_requests,
        "graph_launches_per_propose": per_propose,
        "graph_launches_per_round": per_round,
        "lowering": drafter.resolution.lowering,
        "prefill": drafter.resolution.prefill,
        "lowering_refusals": drafter.resolution.refusals,
        "platform": info.name,
        "device": info.device_name,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "tokens_per_second_without_drafting": plain,
        **folders,
        "version": __version__,
        "versions": dict(info.versions),
    }


def _launches_of_rounds(generator: TextGenerator) -> int:
    """Graph launches of verifies, proposes and rounds since the capture."""
    return sum(runner.launches[phase] for runner in generator.decoder.runners.values() for phase in _OF_A_ROUND)


def _row(result: Result) -> dict[str, Any]:
    return {
        "text": result.text, "tokens": result.tokens, "num_tokens": len(result.tokens),
        "finish_reason": result.finish_reason, "seconds": result.seconds,
    }  # fmt: skip


def _table(console: Console, report: dict[str, Any], generator: TextGenerator) -> None:
    table = Table(show_header=False)
    one, length = "results" not in report, report["mean_acceptance_length"]
    reason = f"{report['finish_reason'] or 'interrupted'} after " if "text" in report else ""
    table.add_row("finished", f"{reason}{report['num_tokens']} tokens in {report['rounds']} rounds")
    table.add_row("mean acceptance length", "no round" if length is None else f"{length:.2f}")
    if length is not None:
        shares = [f"{share:.0%}" for share in report["acceptance_per_position"][:16]]
        more = "  ..." if len(report["acceptance_per_position"]) > 16 else ""
        table.add_row("acceptance per position", "  ".join(shares) + more)
    if not one:
        table.add_row("prompts", f"{len(report['results'])}, {report['max_num_requests']} at a time")
    elif "sequences" in report:
        table.add_row("sequences", f"{report['n']}, {report['max_num_requests']} at a time")
    by_k = report["drafts_by_k"]
    used = ", ".join(f"{k}: {by_k[k]}" for k in sorted(by_k)) if len(by_k) > 1 else ""
    table.add_row("draft tokens K", str(report["num_speculative_tokens"]) + (f" (drafts by K: {used})" if used else ""))
    if one:
        sampling = f"temperature {report['temperature']:g}, seed {report['seed']}"
        table.add_row("sampling", sampling if report["temperature"] else "greedy")
    table.add_row("graph launches per propose", f"{report['graph_launches_per_propose']:g}")
    table.add_row("graph launches per round", f"{report['graph_launches_per_round']:.3g}")
    table.add_row("tokens/s", f"{report['tokens_per_second']:.0f}")
    if report["tokens_per_second_without_drafting"] is not None:
        table.add_row("tokens/s without drafting", f"{report['tokens_per_second_without_drafting']:.0f}")
    table.add_row("platform", f"{report['platform']} ({report['device']}), specgraph {report['version']}")
    table.add_row("target, drafter", f"{report['target']}, {report['draft']}")
    table.add_row("lowering", generator.decoder.drafter.resolution.explain() if generator.decoder.drafter else "")
    console.print(table)
    if _is_hardly_accepted(report):
        console.print(
            "Hardly any draft token is accepted: is the drafter one for this target? `specgraph audit` tells whether "
            "its graphs draft what eager drafts; docs/debugging-acceptance.md has the other causes."
        )


def _is_hardly_accepted(report: dict[str, Any]) -> bool:
    """Whether fewer than one in twenty first drafts were accepted, over enough rounds to tell."""
    shares = report["acceptance_per_position"]
    return report["rounds"] >= 16 and bool(shares) and shares[0] < 0.05
