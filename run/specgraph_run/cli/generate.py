"""`specgraph generate`: text from a target and its drafter, accepted draft tokens marked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from specgraph.validation import environment_number
from specgraph_run.cli.load import check_processes, choose_folders, load_pair
from specgraph_run.cli.options import (
    DraftOption,
    JsonOption,
    ModelOption,
    PlatformOption,
    StopOption,
    TargetOption,
    with_generator_options,
    with_options,
)
from specgraph_run.cli.output import check_output, exit_interrupted, print_summary, text_consoles, write_json
from specgraph_run.cli.prompts import Prompt, read_prompts
from specgraph_run.cli.streaming import LEGEND, Result, gather_results, show_texts
from specgraph_run.cli.waiting import waiting
from specgraph_run.options import GeneratorOptions, check_num_sequences

if TYPE_CHECKING:
    from specgraph_run.decoder.request import Request
    from specgraph_run.text.generator import TextGenerator
    from specgraph_run.text.stream import TextStream

_OF_A_ROUND = ("verify", "propose")
"""The phases of the programs in one round."""
_MOST_TOGETHER = 8
"""The most prompts that run together if --max-num-requests is not given. Every size up to it is captured."""


@with_options(Prompt, "settings")
@with_generator_options(without=("sampled", "max_num_requests", "sampling_parameters", "logprobs"))
def generate(
    model: ModelOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt; - reads it from standard input.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines: {"prompt": TEXT}, each with max_tokens, temperature, stop ... if wanted.'),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the target's chat template.")] = False,
    stop: StopOption = None,
    settings: Any = None,
    max_num_requests: Annotated[
        int | None, typer.Option(min=1, help="Prompts that run together. Default: all, at most 8.")
    ] = None,
    compare: Annotated[
        bool, typer.Option(help="Also decode without drafting, and show both speeds; not with --data-parallel.")
    ] = True,
    options: Any = None,
    platform: PlatformOption = None,
    json: JsonOption = None,
) -> None:
    """Generate text with speculative decoding; text from accepted draft tokens is green and underlined."""
    check_output("--json", json)
    check_processes(options)
    rank = environment_number("RANK", 0)
    if rank:
        json = None  # the first rank writes
    target, draft = choose_folders(target, draft, model)
    asked = read_prompts(prompt, prompts, replace(settings, stop=stop or ()))
    for each in asked:
        check_num_sequences(each.n, each.temperature)
    chosen = replace(
        options,
        sampled=any(each.temperature > 0 for each in asked),
        sampling_parameters=any(each.has_parameters for each in asked),
        max_num_requests=max_num_requests or min(sum(each.n for each in asked), _MOST_TOGETHER),
    )
    consoles = _, console = text_consoles(json, quiet=rank > 0)
    shown = [f"> {each.prompt}\n" if chat else each.prompt for each in asked]
    with waiting() as captured:
        generator, description = load_pair(target, draft, platform, chosen, captured)
        groups = _streams(generator, asked, chat)
        for stream in chain(*groups):
            generator.decoder.check(stream.request)
    console.print(description)
    if console.is_terminal and not console.is_dumb_terminal:  # a dumb terminal shows no styles
        console.print(LEGEND)
    run, broken = _Run(), None
    try:
        _generate(generator, groups, shown, consoles, run)
        if compare and generator.decoder.drafter is not None and chosen.data_parallel == 1:
            run.tokens_per_second_alone = _time_target_alone((target, draft), generator, chosen, asked, chat)
    except KeyboardInterrupt:
        run.interrupted = True
    except OSError as error:  # the text can't be written: its reader is gone, or a disk is full
        run.interrupted, broken = True, error
    names = ("tiny-python" if target is None else str(target), str(draft) if draft else None)
    if target is None and draft is None:
        names = ("tiny-python", "eagle3")
    report = _report(generator, asked, run, *names)
    generator.close()
    write_json(report, json)
    if broken is not None:
        raise broken
    if run.interrupted:
        console.print()
    _show(console, report, generator, [stream.request for stream in chain(*groups)])
    if target is None:
        console.print(
            "[dim]tiny-python is a toy of 3.5 million parameters, to see that drafting works: its figures say little "
            "about a language model. For one: specgraph chat --model smollm2[/]"
        )
    if run.interrupted:
        exit_interrupted()


@dataclass(slots=True)
class _Run:
    """The results of all prompts, up to the end or to Ctrl-C."""

    results: list[Result] = field(default_factory=list[Result])
    """One result per request, in the order of the prompts."""
    seconds: float = 0.0
    graph_launches: int = 0
    """Launches of verifies and proposes."""
    tokens_per_second_alone: float | None = None
    """Speed of the same prompts without drafting. None if it was not measured."""
    interrupted: bool = False


def _requests(generator: TextGenerator, asked: list[Prompt], chat: bool) -> list[list[Request]]:
    """Return the requests of each prompt."""
    return [generator.requests(each.prompt, chat=chat, **each.settings) for each in asked]


def _streams(generator: TextGenerator, asked: list[Prompt], chat: bool) -> list[list[TextStream]]:
    """Return the streams of each prompt. `show_texts` will push their chunks."""
    from specgraph_run.text.stream import TextStream

    return [
        [TextStream(generator.tokenizer, request, None, each.stop, each.skip_special_tokens) for request in requests]
        for each, requests in zip(asked, _requests(generator, asked, chat), strict=True)
    ]


def _generate(
    generator: TextGenerator,
    groups: list[list[TextStream]],
    prompts: list[str],
    consoles: tuple[Console, Console],
    run: _Run,
) -> None:
    """Show all texts as they come, and fill in `run`, also if Ctrl-C interrupts it."""
    streams, layout = list(chain(*groups)), generator.layout
    prompt_of = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
    own = slice(None) if layout is None else slice(layout.data_rank, None, layout.data_size)  # this rank's requests
    if layout is not None and layout.data_size > 1:
        groups, prompts = [[stream] for stream in streams[own]], prompt_of[own]
    earlier = _launches_of_rounds(generator)  # -k auto has timed some rounds before
    start = time.perf_counter()
    try:
        try:
            show_texts(generator, groups, consoles, run.results, prompts)
        finally:
            run.seconds = time.perf_counter() - start
            run.graph_launches = _launches_of_rounds(generator) - earlier
        run.results = gather_results(generator, run.results, prompt_of, consoles)
    finally:
        if len(run.results) < len(streams):  # the results of other data parallel ranks were not gathered
            known = dict(zip(range(len(streams))[own], run.results, strict=False))
            run.results = [known.get(i, Result()) for i in range(len(streams))]


def _time_target_alone(
    pair: tuple[Path | None, Path | None],
    like: TextGenerator,
    options: GeneratorOptions,
    asked: list[Prompt],
    chat: bool,
) -> float:
    """Return the tokens per second of the same prompts without drafting, on the platform of `like`."""
    from specgraph_run.text.load import load_generator

    options = replace(options, synthetic_acceptance=None)
    with waiting() as captured:
        alone = load_generator(*pair, platform=like.platform, speculate=False, progress=captured, options=options)
    start = time.perf_counter()
    results = alone.generate(list(chain(*_requests(alone, asked, chat))))
    seconds = time.perf_counter() - start
    alone.close()
    return sum(len(result.token_ids) for result in results) / seconds


def _report(generator: TextGenerator, asked: list[Prompt], run: _Run, target: str, draft: str | None) -> dict[str, Any]:
    """Return the report that `--json` writes."""
    from specgraph import __version__

    drafter, info = generator.decoder.drafter, generator.platform.info
    resolution = (drafter or generator.decoder.target).resolution
    accepted = [count for result in run.results for count in result.accepted]
    positions = 0 if drafter is None else drafter.config.num_speculative_tokens
    tokens = sum(len(result.tokens) for result in run.results)
    rest = iter(run.results)
    rows = [_row(prompt, list(islice(rest, prompt.n))) for prompt in asked]
    per_round = run.graph_launches / max(generator.decoder.rounds.num_rounds, 1)
    per_propose = 0 if drafter is None else per_round
    if drafter is not None and drafter.num_proposes:
        per_propose = drafter.launches["propose"] / drafter.num_proposes
    return {
        **(rows[0] if len(rows) == 1 else {"results": rows, "num_tokens": tokens}),
        "num_speculative_tokens": positions,
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted) if accepted else None,
        "acceptance_per_position": [
            sum(count > place for count in accepted) / len(accepted) if accepted else None for place in range(positions)
        ],
        "rounds": len(accepted),
        "drafts_by_k": generator.decoder.metrics.drafts_by_k,
        "rows_without_block": 0 if drafter is None else drafter.rows_without_block,
        "max_num_requests": generator.decoder.config.max_num_requests,
        "stop_token_ids": generator.stop_token_ids,
        "graph_launches_per_propose": per_propose,
        "graph_launches_per_round": per_round,
        "lowering": resolution.lowering,
        "prefill": resolution.prefill,
        "lowering_refusals": resolution.refusals,
        "platform": info.name,
        "device": info.device_name,
        "tokens_per_second": tokens / run.seconds if run.seconds else 0.0,
        "tokens_per_second_without_drafting": run.tokens_per_second_alone,
        "target": target,
        "draft": draft,
        "version": __version__,
        "versions": dict(info.versions),
        **({"interrupted": True} if run.interrupted else {}),
    }


def _launches_of_rounds(generator: TextGenerator) -> int:
    """Return the graph launches of verifies and proposes since the capture."""
    return sum(runner.launches[phase] for runner in generator.decoder.runners.values() for phase in _OF_A_ROUND)


def _row(prompt: Prompt, results: list[Result]) -> dict[str, Any]:
    """Return the report's entry for one prompt."""
    sequences = [
        {
            "text": result.text, "tokens": result.tokens, "num_tokens": len(result.tokens),
            "finish_reason": result.finish_reason, "seed": result.seed, "seconds": result.seconds,
        }
        for result in results
    ]  # fmt: skip
    if prompt.n == 1:
        return asdict(prompt) | sequences[0]
    return asdict(prompt) | {"num_tokens": sum(len(result.tokens) for result in results), "sequences": sequences}


def _show(console: Console, report: dict[str, Any], generator: TextGenerator, requests: list[Request]) -> None:
    decoder = generator.decoder
    longest, resolution = decoder.config.max_model_len, (decoder.drafter or decoder.target).resolution
    rows = [*_summary(report), ("lowering", resolution.explain())]
    room = [longest - len(each.prompt_token_ids) for each in requests]
    cut = [most for most, each in zip(room, requests, strict=True) if most < each.max_tokens]
    if cut:
        rows.append(("--max-tokens", f"{min(cut)} fit behind a prompt: max_model_len is {longest}"))
    print_summary(console, rows)
    shares = report["acceptance_per_position"]
    if report["rounds"] >= 16 and shares and shares[0] < 0.05:
        console.print(
            "Hardly any draft token is accepted: is the drafter one for this target? `specgraph audit` tells whether "
            "its graphs draft what eager drafts; docs/debugging-acceptance.md has the other causes."
        )


def _summary(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each figure that is shown to people."""
    length, shares = report["mean_acceptance_length"], report["acceptance_per_position"]
    reason = f"{report['finish_reason'] or 'interrupted'} after " if "text" in report else ""
    yield "finished", f"{reason}{report['num_tokens']} tokens in {report['rounds']} rounds"
    drafted = report["draft"] is not None
    if drafted:
        yield "mean acceptance length", "no round" if length is None else f"{length:.2f}"
    if drafted and length is not None:
        more = "  ..." if len(shares) > 16 else ""
        yield "acceptance per position", "  ".join(f"{share:.0%}" for share in shares[:16]) + more
    if "results" in report:
        yield "prompts", f"{len(report['results'])}, {report['max_num_requests']} at a time"
    elif "sequences" in report:
        yield "sequences", f"{report['n']}, {report['max_num_requests']} at a time"
    by_k = report["drafts_by_k"]
    used = ", ".join(f"{k}: {by_k[k]}" for k in sorted(by_k))
    if drafted:
        more = f" (drafts by K: {used})" if len(by_k) > 1 else ""
        yield "draft tokens K", f"{report['num_speculative_tokens']}{more}"
    if "results" not in report:
        seed = "" if report["seed"] is None else f", seed {report['seed']}"
        sampling = f"temperature {report['temperature']:g}{seed}"
        yield "sampling", sampling if report["temperature"] else "greedy"
    if drafted:
        yield "graph launches per propose", f"{report['graph_launches_per_propose']:g}"
    yield "graph launches per round", f"{report['graph_launches_per_round']:.3g}"
    yield "tokens/s", f"{report['tokens_per_second']:.0f}"
    if report["tokens_per_second_without_drafting"] is not None:
        yield "tokens/s without drafting", f"{report['tokens_per_second_without_drafting']:.0f}"
    yield "platform", f"{report['platform']} ({report['device']}), specgraph {report['version']}"
    yield "target, drafter", f"{report['target']}, {report['draft'] or 'none'}"
