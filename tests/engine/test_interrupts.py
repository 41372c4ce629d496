"""Ctrl-C at any line, once and twice in a row, and cancel() from another thread at any line: the next call is right.

The signal is a real one. A trace function sends it at the n-th line of ours, and a profile function the second one: a
hook that raises is removed by the interpreter, so each of them sends one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import specgraph
from specgraph.engine import Request, TextGenerator

MOMENTS = int(os.environ.get("SPECGRAPH_INTERRUPTS", "100"))
"""Moments in all; 2,000 in the long form."""
OURS = str(Path(specgraph.__file__).parent)
ASKED = ((17, 4, 9), 9), ((99, 4, 9, 5), 4), ((7,) * 20, 2), ((3, 8), 4)
"""Prompts, and tokens to generate; two run together."""
PROBE = Request(prompt_token_ids=[8, 4, 9, 5], max_tokens=6)


@pytest.fixture(scope="module", params=[1, 0], ids=["ahead", "read at once"])
def generator(request) -> Iterator[TextGenerator]:
    with specgraph.load_generator(
        platform="cpu", max_model_len=64, num_speculative_tokens=3, prefill_sizes=[16], max_num_requests=2,
        num_blocks=12, block_size=8, rounds_ahead=request.param,
    ) as made:  # fmt: skip
        yield made


@pytest.fixture(autouse=True)
def _inference():
    """Replace the fixture of this name: an interrupt may come in the caller's grad mode."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def requests() -> list[Request]:
    return [Request(prompt_token_ids=prompt, max_tokens=count) for prompt, count in ASKED]


class Moments:
    """Does something at the `at`-th line of ours, and the same again `gap` calls and returns of ours later."""

    def __init__(self, at: int, do: Callable[[], None], gap: int = 0) -> None:
        self.at, self.do, self.gap, self.lines, self.calls = at, do, gap, 0, 0
        self.places: dict[tuple[str, int], list[int]] = {}
        """Each line of our code, and when it ran first and last."""

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            self.lines += 1
            place = frame.f_code.co_filename, frame.f_lineno
            self.places[place] = [*self.places.get(place, [])[:1], self.lines]
            if self.lines == self.at:
                if self.gap:
                    sys.setprofile(self.profile)
                self.do()
        return self.trace

    def profile(self, frame: Any, event: str, _: Any) -> None:
        if frame.f_code.co_filename.startswith(OURS):
            self.calls += 1
            if self.calls == self.gap:
                self.do()

    def run(self, call: Callable[[], Any]) -> None:
        sys.settrace(self.trace)
        try:
            call()
        finally:
            sys.settrace(None)
            sys.setprofile(None)


def moments(use: Callable[[], Any], count: int) -> list[int]:
    """The numbers of lines that run in `use`, of as many different lines of our code as there are."""
    seen = Moments(0, use)
    seen.run(use)
    every = sorted({at for times in seen.places.values() for at in times})
    return [every[number * (len(every) - 1) // (count - 1)] for number in range(count)]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def steps(generator: TextGenerator) -> list[int]:
    ids = [generator.add(each) for each in requests()]
    while generator.decoder.num_unfinished:
        generator.step()
    return ids


def cancelled(generator: TextGenerator) -> None:
    ids = [generator.add(each) for each in requests()]
    generator.step()
    for number in ids[1:3]:
        generator.cancel(number)
    for _ in range(3):
        generator.step()


def stream(generator: TextGenerator) -> None:
    for _ in generator.stream(requests()):
        pass


def closed_stream(generator: TextGenerator) -> None:
    chunks = generator.stream(requests())
    for _ in range(3):
        next(chunks)
    chunks.close()


def text(generator: TextGenerator) -> None:
    with generator.stream_text("def f(x):\n", max_tokens=20, stop=["\n\n"]) as pieces:
        for _, _ in zip(range(5), pieces, strict=False):
            pass


USES = [steps, cancelled, stream, closed_stream, text, lambda generator: generator.generate(requests())]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("use", USES, ids=["steps", "cancel", "stream", "close", "stream_text", "generate"])
def test_the_next_call_is_right_after_an_interrupt_at_any_line(generator: TextGenerator, use: Callable[..., Any]):
    decoder = generator.decoder
    alone = decoder.generate([PROBE])
    count = max(2, MOMENTS // len(USES) // 2)
    places = moments(lambda: use(generator), count)
    finish(generator)
    wrong: list[str] = []
    for number, at in enumerate(places):
        gap = (0, 1, 3, 10)[number % 4] if number % 3 else 0
        with suppress(KeyboardInterrupt):
            Moments(at, interrupt, gap).run(lambda: use(generator))
        try:
            finish(generator)
            if decoder.generate([PROBE]) != alone:
                wrong.append(f"{at}, {gap}: other tokens")
            if decoder.allocator.num_free != decoder.allocator.capacity or decoder.num_unfinished or decoder.step():
                wrong.append(f"{at}, {gap}: {decoder.allocator.num_free} blocks are free")
        except Exception as error:
            wrong.append(f"{at}, {gap}: {type(error).__name__}: {error}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)


def finish(generator: TextGenerator) -> None:
    """Step until nothing is left: each request then has one end."""
    ended: set[int] = set()
    for _ in range(200):
        if not generator.decoder.num_unfinished:
            return
        for chunk in generator.step():
            assert chunk.request not in ended
            ended |= {chunk.request} if chunk.finish_reason else set()
    raise AssertionError("it goes on for ever")
