"""`specgraph generate`: text from a target and its drafter, accepted draft tokens marked."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specgraph.cli.options import DraftOption, JsonOption, PlatformOption, TargetOption, with_engine_options
from specgraph.cli.output import check_output, write_json
from specgraph.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from specgraph.decoding.request import Request
    from specgraph.decoding.text import TextGenerator
    from specgraph.platforms import Platform

DEFAULT_PROMPT = '''def read_chunk(self, size):
    """Read at most size bytes, returned as a bytes object."""
    if self.closed:
        raise ValueError("I/O operation on closed file")
'''


@dataclass(frozen=True, slots=True)
class Timed:
    """Generated tokens and the wall time they took, prefill included, capture not."""

    token_ids: list[int]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, prefill included."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


@with_engine_options(without=("sampled", "max_num_requests"))
def generate(
    target: TargetOption = None,
    draft: DraftOption = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Sampling repeats for the same seed.")] = 0,
    compare: Annotated[bool, typer.Option(help="Also decode without drafting, and show both speeds.")] = True,
    options: Any = None,
    platform: PlatformOption = None,
    json: JsonOption = None,
) -> None:
    """Generate text with speculative decoding; accepted draft tokens are shown green."""
    check_output("--json", json)
    from specgraph.decoding.text import load_generator
    from specgraph.platforms import open_platform

    text = _prompt(prompt, prompt_file)
    opened = open_platform(platform)

    def load(speculate: bool) -> TextGenerator:
        acceptance = options.synthetic_acceptance if speculate else None
        chosen = replace(options, sampled=temperature > 0, synthetic_acceptance=acceptance)
        return load_generator(target, draft, platform=opened, speculate=speculate, options=chosen)

    console = Console(file=sys.stderr if json == "-" else sys.stdout, highlight=False)
    generator = load(speculate=True)
    request = generator.request(text, max_tokens=max_tokens, temperature=temperature, seed=seed)
    generator.decoder.check(request)
    console.print(f"[dim]{generator.description}[/]\n")
    run = _run(generator, request, console)
    plain = _plain(load, text, request) if compare else None
    report = _report(generator, run, plain, opened)
    _table(console, report, generator)
    if json is not None:
        write_json(report, json)
    generator.close()


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise ConfigError("give --prompt or --prompt-file, not both")
    if prompt_file is None:
        return DEFAULT_PROMPT if prompt is None else prompt
    try:
        return prompt_file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompt file can't be read: {error}") from error


def _run(generator: TextGenerator, request: Request, console: Console) -> Timed:
    """Stream to the terminal. Bytes of one character may come in several tokens, so text is decoded as a whole."""
    ids: list[int] = []
    shown = ""
    console.print(generator.tokenizer.decode(list(request.prompt_token_ids)), style="dim", end="", markup=False)
    start = time.perf_counter()
    for chunk in generator.stream([request]):
        if chunk.finish_reason == "refused":
            raise CapacityError(chunk.message)
        for part, style in (
            (chunk.token_ids[: chunk.num_accepted], "green"),
            (chunk.token_ids[chunk.num_accepted :], None),
        ):
            ids += part
            whole = generator.tokenizer.decode(ids)
            if part and not whole.endswith("\N{REPLACEMENT CHARACTER}"):
                console.print(whole[len(shown) :], style=style, end="", markup=False, soft_wrap=True)
                shown = whole
    seconds = time.perf_counter() - start
    console.print("\n")
    return Timed(ids, seconds)


def _plain(load: Any, text: str, request: Request) -> Timed:
    generator: TextGenerator = load(speculate=False)
    start = time.perf_counter()
    result = generator.generate([request])[0]
    seconds = time.perf_counter() - start
    generator.close()
    return Timed(result.token_ids, seconds)


def _report(generator: TextGenerator, run: Timed, plain: Timed | None, platform: Platform) -> dict[str, Any]:
    drafter, metrics = generator.decoder.drafter, generator.decoder.metrics
    assert drafter is not None
    launches = drafter.runner.launches / drafter.num_proposes if drafter.runner and drafter.num_proposes else 0.0
    return {
        "text": generator.tokenizer.decode(run.token_ids),
        "tokens": run.token_ids,
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "acceptance_per_position": metrics.acceptance_per_position,
        "rounds": metrics.rounds,
        "graph_launches_per_propose": launches,
        "mode": drafter.resolution.mode.name,
        "lowering": drafter.resolution.lowering,
        "lowering_refusals": drafter.resolution.refusals,
        "platform": platform.info.name,
        "device": platform.info.device_name,
        "tokens_per_second": run.tokens_per_second,
        "tokens_per_second_without_drafting": None if plain is None else plain.tokens_per_second,
    }


def _table(console: Console, report: dict[str, Any], generator: TextGenerator) -> None:
    table = Table(show_header=False)
    positions = "  ".join(f"{share:.0%}" for share in report["acceptance_per_position"])
    table.add_row("mean acceptance length", f"{report['mean_acceptance_length']:.2f}")
    table.add_row("acceptance per position", positions)
    table.add_row("rounds", str(report["rounds"]))
    table.add_row("graph launches per propose", f"{report['graph_launches_per_propose']:g}")
    table.add_row("tokens/s", f"{report['tokens_per_second']:.0f}")
    if report["tokens_per_second_without_drafting"] is not None:
        table.add_row("tokens/s without drafting", f"{report['tokens_per_second_without_drafting']:.0f}")
    table.add_row("platform", f"{report['platform']} ({report['device']})")
    table.add_row("lowering", generator.decoder.drafter.resolution.explain() if generator.decoder.drafter else "")
    console.print(table)
