"""`specgraph generate`: text from a target and its drafter, accepted draft tokens marked."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specgraph.cli.json_output import write_json
from specgraph.decoding.request import Request
from specgraph.decoding.text import TextGenerator, load_generator
from specgraph.drafting.config import LoweringChoice, ModeChoice
from specgraph.errors import CapacityError, ConfigError
from specgraph.platforms import Platform, open_platform

DEFAULT_PROMPT = '''def read_chunk(self, size):
    """Read at most size bytes, returned as a bytes object."""
    if self.closed:
        raise ValueError("I/O operation on closed file")
'''


@dataclass(frozen=True, slots=True)
class Timed:
    """One generation with its wall time: prefill counted, capture not."""

    token_ids: list[int]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, prefill included."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


def generate(
    target: Annotated[Path | None, typer.Option(help="Folder of the target. The shipped pair by default.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Folder of the drafter.")] = None,
    num_modules: Annotated[
        int | None, typer.Option(help="MTP modules to use; 1 reuses the first. All if unsaid.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    num_speculative_tokens: Annotated[int, typer.Option("-k", "--num-speculative-tokens", help="Draft tokens K.")] = 5,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 200,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and output together.")] = None,
    lowering: Annotated[LoweringChoice, typer.Option(help="How the draft loop becomes graphs.")] = "auto",
    mode: Annotated[ModeChoice, typer.Option(help="Which passes run from graphs.")] = "auto",
    synthetic_acceptance: Annotated[
        str | None, typer.Option(help="For speed tests: accept by this rate, or these comma-separated shares.")
    ] = None,
    attention: Annotated[
        str, typer.Option(help="device, host (where lengths come from), or one of the platform's own.")
    ] = "auto",
    platform: Annotated[str | None, typer.Option(help="NAME or NAME:INDEX; see `specgraph platforms`.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Sampling repeats for the same seed.")] = 0,
    compare: Annotated[bool, typer.Option(help="Also decode without drafting, and show both speeds.")] = True,
    json: Annotated[str | None, typer.Option(help="Write JSON to this file, or - for standard output.")] = None,
) -> None:
    """Generate text with speculative decoding; accepted draft tokens are shown green."""
    text = _prompt(prompt, prompt_file)
    acceptance = _acceptance(synthetic_acceptance)
    opened = open_platform(platform)

    def load(speculate: bool) -> TextGenerator:
        return load_generator(
            target,
            draft,
            platform=opened,
            num_speculative_tokens=num_speculative_tokens,
            max_model_len=max_model_len,
            lowering=lowering,
            mode=mode,
            synthetic_acceptance=acceptance if speculate else None,
            sampled=temperature > 0,
            attention=attention,
            speculate=speculate,
            num_modules=num_modules if speculate else None,
        )

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


def _acceptance(text: str | None) -> float | list[float] | None:
    """A rate, or shares by position."""
    if text is None:
        return None
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--synthetic-acceptance {text}: give a rate (0.7), or a share a position (0.8,0.6,0.5)"
        ) from None
    return shares[0] if len(shares) == 1 else shares


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
