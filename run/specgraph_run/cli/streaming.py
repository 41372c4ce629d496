"""Generates for prompts and shows their texts on a terminal, accepted draft tokens marked."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from specgraph_run.text.generator import TextGenerator
    from specgraph_run.text.stream import TextPiece, TextStream

ACCEPTED = "green underline"
"""Style of accepted text. Underlined too, for terminals without colour."""

LEGEND = f"[dim]text from accepted draft tokens looks[/] [{ACCEPTED}]like this[/]"


@dataclass(slots=True)
class Result:
    """The outcome of one prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None
    """The reason why it ended; None if it was interrupted."""
    accepted: list[int] = field(default_factory=list[int])
    """`TextStream.accepted`."""
    seed: int | None = None
    """`TextStream.seed`."""
    seconds: float = 0.0
    """The time until its last token: waiting for a place in the batch and prefill included, capture not."""


def show_texts(
    generator: TextGenerator,
    groups: Sequence[Sequence[TextStream]],
    consoles: tuple[Console, Console],
    results: list[Result],
    prompts: Sequence[str] = (),
) -> None:
    """Generate for all streams, as many together as the generator takes, and show the texts in their order.

    The first unfinished text is shown as it comes, the others when it is their turn.

    Args:
        groups: the streams of each prompt, without chunks: the prompt is shown once, before the first of them.
        consoles: see `text_consoles`.
        results: gets one result per stream, also where this is interrupted.
        prompts: the text to show of each prompt; none shows none.
    """
    text, notes = consoles
    streams = [stream for group in groups for stream in group]
    places = [(number, place, len(group)) for number, group in enumerate(groups) for place in range(len(group))]
    results += [Result() for _ in streams]
    held: list[list[TextPiece]] = [[] for _ in streams]
    start, shown = time.perf_counter(), 0

    def begin() -> None:
        number, place, of = places[shown]
        if place:
            seed = streams[shown].request.seed
            notes.print(f"[dim]sequence {place + 1} of {of}{'' if seed is None else f', seed {seed}'}:[/]")
        elif prompts:
            show_prompt(prompts[number], consoles)

    indices: dict[int, int] = {}
    if streams:
        begin()
    try:
        indices |= {generator.add(stream.request): i for i, stream in enumerate(streams)}
        while True:
            for chunk in generator.step():
                i = indices.get(chunk.request)
                if i is None:  # of an answer before, whose end an interrupt skipped
                    generator.cancel(chunk.request)
                    continue
                if results[i].finish_reason is not None:
                    continue  # it ended at a stop string, and this says that it is cancelled
                held[i] += streams[i].push(chunk)
                _fill(results[i], streams[i], time.perf_counter() - start)
                if streams[i].finish_reason is not None and chunk.finish_reason is None:
                    generator.cancel(chunk.request)
            while shown < len(streams):
                for piece in held[shown]:
                    style = ACCEPTED if piece.is_accepted else None
                    text.print(piece.text, style=style, end="", markup=False, soft_wrap=True)
                held[shown].clear()
                if results[shown].finish_reason is None:
                    break
                text.print("\n" if text is notes else "")
                shown += 1
                if shown < len(streams):
                    begin()
            if shown == len(streams) and not generator.decoder.others_unfinished:
                break
    finally:
        for i, stream in enumerate(streams):
            if results[i].finish_reason is None:
                _fill(results[i], stream, time.perf_counter() - start)
        for request_id in indices:
            generator.cancel(request_id)
        generator.step()  # hands out, and so forgets, the last chunks of what was cancelled


def gather_results(
    generator: TextGenerator, results: list[Result], prompts: Sequence[str], consoles: tuple[Console, Console]
) -> list[Result]:
    """Return the results of all data parallel ranks in the order of the prompts, of which each rank had every n-th one.

    Shows the texts of the other ranks, by their prompts.

    Args:
        results: of the requests of this rank.
        prompts: the text of each request's prompt, of all ranks.
        consoles: see `text_consoles`.
    """
    layout = generator.layout
    if layout is None or layout.data_size == 1:
        return results
    told = layout.ranks.tell("the results", json.dumps([asdict(result) for result in results]))
    parts = [[Result(**each) for each in json.loads(text)] for text in told[:: layout.ranks.size // layout.data_size]]
    every = [parts[i % layout.data_size][i // layout.data_size] for i in range(sum(map(len, parts)))]
    for i, (prompt, result) in enumerate(zip(prompts, every, strict=True)):
        if i % layout.data_size != layout.data_rank:
            show_prompt(prompt, consoles)
            consoles[0].print(result.text, markup=False, soft_wrap=True)
    return every


def show_prompt(prompt: str, consoles: tuple[Console, Console]) -> None:
    """Show a prompt, before the text that follows it."""
    text, notes = consoles
    notes.print()
    notes.print(prompt, style="dim", end="" if text is notes else "\n", markup=False, soft_wrap=True)


def _fill(result: Result, stream: TextStream, seconds: float) -> None:
    result.text, result.tokens, result.accepted = stream.text, stream.token_ids, stream.accepted
    result.finish_reason, result.seed, result.seconds = stream.finish_reason, stream.seed, seconds
