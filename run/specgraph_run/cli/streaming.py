"""Generates the texts of prompts and shows them on a terminal, with accepted draft tokens marked."""

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
"""Style of text from accepted draft tokens. It is underlined for terminals without colour."""

LEGEND = f"[dim]text from accepted draft tokens looks[/] [{ACCEPTED}]like this[/]"


@dataclass(slots=True)
class Result:
    """The result of one request."""

    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None
    """The reason for the request's end. None if it was interrupted."""
    accepted: list[int] = field(default_factory=list[int])
    """`TextStream.accepted`."""
    seed: int | None = None
    """`TextStream.seed`."""
    seconds: float = 0.0
    """Seconds until its last token, with the wait for a place in the batch and prefill, without capture."""


def show_texts(
    generator: TextGenerator,
    groups: Sequence[Sequence[TextStream]],
    consoles: tuple[Console, Console],
    results: list[Result],
    prompts: Sequence[str] = (),
) -> None:
    """Generate the texts of all streams in batches of the generator's size, and show them in the streams' order.

    The first unfinished text is shown as it comes. A later text is shown once the texts before it are finished.

    Args:
        groups: the streams of each prompt, still without chunks. A prompt is shown before its first stream.
        consoles: see `text_consoles`.
        results: receives one result per stream, also if Ctrl-C interrupts the function.
        prompts: the text to show for each prompt. If it is empty, no prompt is shown.
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
                if i is None:  # a request of an earlier, interrupted answer
                    generator.cancel(chunk.request)
                    continue
                if results[i].finish_reason is not None:
                    continue  # it ended at a stop string: this chunk only reports that it is cancelled
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
        generator.step()  # the decoder hands out the cancelled requests' last chunks, and forgets them


def gather_results(
    generator: TextGenerator, results: list[Result], prompts: Sequence[str], consoles: tuple[Console, Console]
) -> list[Result]:
    """Gather the results of all data parallel ranks, in the order of the requests, and show the other ranks' texts.

    With n data parallel ranks, each rank has every n-th request.

    Args:
        results: the results of this rank's requests.
        prompts: the prompt of each request, for the requests of all ranks.
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
    """Show a prompt before its text."""
    text, notes = consoles
    notes.print()
    notes.print(prompt, style="dim", end="" if text is notes else "\n", markup=False, soft_wrap=True)


def _fill(result: Result, stream: TextStream, seconds: float) -> None:
    result.text, result.tokens, result.accepted = stream.text, stream.token_ids, stream.accepted
    result.finish_reason, result.seed, result.seconds = stream.finish_reason, stream.seed, seconds
