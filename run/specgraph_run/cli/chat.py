"""`specgraph chat`: a conversation with a target in a terminal, accepted draft tokens marked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from specgraph.errors import CapacityError, ConfigError
from specgraph_run.cli.load import check_processes, choose_folders, load_pair
from specgraph_run.cli.options import (
    DraftOption,
    ModelOption,
    PlatformOption,
    StopOption,
    with_generator_options,
    with_options,
)
from specgraph_run.cli.output import text_consoles
from specgraph_run.cli.prompts import Prompt
from specgraph_run.cli.streaming import LEGEND, Result, show_texts
from specgraph_run.cli.waiting import waiting


@with_options(Prompt, "settings", only=("max_tokens", "temperature", "seed", "skip_special_tokens"), max_tokens=512)
@with_generator_options(
    without=("sampled", "max_num_requests", "sampling_parameters", "logprobs", "synthetic_acceptance")
)
def chat(
    model: ModelOption = None,
    target: Annotated[
        Path | None, typer.Option(help="Folder or GGUF file of a target that has a chat template.")
    ] = None,
    draft: DraftOption = None,
    system: Annotated[str | None, typer.Option(help="A message of the system, before all others.")] = None,
    stop: StopOption = None,
    settings: Any = None,
    options: Any = None,
    platform: PlatformOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say at the start how the models run.")] = False,
) -> None:
    """Talk to a target that has a chat template, one line per message; an empty line or Ctrl-D ends it.

    Every answer sees the whole conversation, which is prefilled again each time. Its speed and its acceptance length
    are shown after it, and those of all answers at the end. The reasoning of gpt-oss is shown
    under the name of its channel; the template decides whether later answers see it.
    """
    check_processes(options)
    target, draft = choose_folders(target, draft, model)
    if target is None:
        raise ConfigError("the shipped target has no chat template: give --model smollm2, or --target")
    consoles = _, console = text_consoles(None)
    messages = [{"role": "system", "content": system}] if system else list[dict[str, str]]()
    with waiting() as captured:
        from specgraph_run.text.chat_template import render_chat
        from specgraph_run.text.harmony import HarmonyStream, is_harmony
        from specgraph_run.text.stream import TextStream

        # A folder without a template is refused here, before the models are loaded.
        render_chat(target, [*messages, {"role": "user", "content": "?"}])
        chosen = replace(options, sampled=settings.temperature > 0)
        generator, description = load_pair(target, draft, platform, chosen, captured)
    with generator:
        if verbose:
            console.print(description)
        drafter = f"drafter {escape(draft.name)}" if draft else "no drafter"
        console.print(
            f"[dim]{escape(target.name)}, {drafter}, on {generator.platform.info.name}; an empty line ends it[/]"
        )
        if console.is_terminal:
            console.print(LEGEND)
        answers, drafts = list[Result](), generator.decoder.drafter is not None
        while line := _line(console):
            messages.append({"role": "user", "content": line})
            try:
                (request,) = generator.requests(messages, **settings.settings)
                generator.decoder.check(request)
            except CapacityError as error:
                print(f"specgraph: the conversation is too long: {error}", file=sys.stderr)
                break
            results: list[Result] = []
            if is_harmony(generator.tokenizer) and settings.skip_special_tokens:
                stream = HarmonyStream(generator.tokenizer, request, stop or ())
            else:
                stream = TextStream(generator.tokenizer, request, None, stop or (), settings.skip_special_tokens)
            try:
                show_texts(generator, [[stream]], consoles, results)
            except KeyboardInterrupt:
                console.print()
            messages.append(_answer(stream.text, is_harmony(generator.tokenizer)))
            console.print(f"[dim]{_speed(results, drafts)}[/]")
            answers += results
    if len(answers) > 1:
        console.print(f"[dim]{len(answers)} answers: {_speed(answers, drafts)}[/]")


def _speed(results: Sequence[Result], drafts: bool) -> str:
    """Describe answers in one line: tokens, speed with prefill, and the acceptance length if there is a drafter."""
    tokens, seconds = sum(len(result.tokens) for result in results), sum(result.seconds for result in results)
    accepted = [count for result in results for count in result.accepted] if drafts else []
    length = f", acceptance length {1 + sum(accepted) / len(accepted):.2f}" if accepted else ""
    return f"{tokens} tokens, {tokens / seconds if seconds else 0:.0f} tokens/s{length}"


def _answer(text: str, harmony: bool) -> dict[str, str]:
    """Return an answer as a message of the conversation. A harmony answer is split into its channels."""
    from specgraph_run.text.harmony import Channels

    if not harmony:
        return {"role": "assistant", "content": text}
    channels = Channels()
    channels.push(text, final=True)
    return channels.message()


def _line(console: Console) -> str:
    """Return the next message, or "" at the end of the input. Raises ConfigError if the input is not text."""
    try:
        return console.input("[bold]> [/]").strip()
    except UnicodeDecodeError as error:
        console.print()
        raise ConfigError(f"standard input can't be read: {error}") from None
    except (EOFError, KeyboardInterrupt, RuntimeError):  # RuntimeError: standard input is closed
        console.print()
        return ""
