"""Ctrl-C at any line, once and twice in a row, and cancel() from another thread at any line: the next call is right.

The signal is a real one. A trace function sends it at the n-th line of ours, and a profile function the second one: a
hook that raises is removed by the interpreter, so each of them sends one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from decoder.pair_decoder import make_pair_decoder
from specgraph_models.checkpoints.tokens import read_tokenizer
from specgraph_run.decoder import Request
from specgraph_run.text import TextGenerator
from specgraph_run.text.load import shipped_pair

import specgraph
from specgraph.errors import CapacityError, ConfigError

MOMENTS = int(os.environ.get("SPECGRAPH_INTERRUPTS", "100"))
"""Moments in all; 2,000 in the long form."""
OURS = str(Path(specgraph.__file__).parent)
ASKED = ((17, 4, 9), 9), ((19, 4, 9, 5), 4), ((7,) * 20, 2), ((3, 8), 4)
"""Prompts, and tokens to generate; two run together."""
PROBE = Request(prompt_token_ids=[8, 4, 9, 5], max_tokens=6)


WAYS = {"a round ahead": ("merged", "device", 1), "read at once": ("merged", "host", 0)}


@pytest.fixture(scope="module", params=WAYS)
def generator(request) -> Iterator[TextGenerator]:
    """A tiny random pair with a tokenizer: its graphs have few ops, so that most lines are of the engine."""
    lowering, lengths, ahead = WAYS[request.param]
    decoder = make_pair_decoder(
        "eagle", lengths, decode=lowering, max_num_requests=2, max_model_len=64, block_size=8, num_blocks=12,
        capture_sizes=[2], rounds_ahead=ahead,
    )  # fmt: skip
    tokenizer = read_tokenizer(shipped_pair()[0])
    with TextGenerator(decoder, tokenizer, (), decoder.platform, Path(), "") as made:
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
    with generator.stream_text(requests()[0], stop=["\n\n"]) as pieces:
        for _, _ in zip(range(3), pieces, strict=False):
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


def test_a_request_is_cancelled_from_another_thread_at_any_line_of_a_step(generator: TextGenerator):
    """It ends once, by the cancel or as it would have; the others have the texts that they have alone."""
    decoder = generator.decoder
    alone = [decoder.generate([each])[0].token_ids for each in requests()]
    places = moments(lambda: steps(generator), max(2, MOMENTS // 4))
    for number, at in enumerate(places):
        victim, ids = number % len(ASKED), [decoder.add(each) for each in requests()]
        tokens: dict[int, list[int]] = {each: [] for each in ids}
        reasons: dict[int, list[str | None]] = {each: [] for each in ids}
        answers: list[bool] = []

        def cancel(request_id=ids[victim], answers=answers) -> None:
            thread = threading.Thread(target=lambda: answers.append(decoder.cancel(request_id)))
            thread.start()
            thread.join()

        def use(tokens=tokens, reasons=reasons) -> None:
            while decoder.num_unfinished:
                for chunk in decoder.step():
                    tokens[chunk.request] += chunk.token_ids
                    reasons[chunk.request] += [chunk.finish_reason] if chunk.finish_reason else []

        Moments(at, cancel).run(use)
        for place, each in enumerate(ids):
            (reason,) = reasons[each]
            whole = alone[place][: len(tokens[each])] if reason == "cancelled" else alone[place]
            assert (reason in ("length", "cancelled")[: 1 + (place == victim)], tokens[each]) == (True, whole), (
                at,
                each,
            )
        assert answers == [True] or reasons[ids[victim]] == ["length"], at
        assert decoder.allocator.num_free == decoder.allocator.capacity


def test_cancel_takes_effect_at_the_next_step_and_once(generator: TextGenerator):
    """The other thread's call comes while a step reads a round."""
    decoder = generator.decoder
    number, read, answers = decoder.add(requests()[0]), decoder.rounds._read, []
    decoder.step()

    def slow(unread):
        for _ in range(2):
            thread = threading.Thread(target=lambda: answers.append(decoder.cancel(number)))
            thread.start()
            thread.join()
        return read(unread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder.rounds, "_read", slow)
        (chunk,) = decoder.step()
    assert (chunk.finish_reason, bool(chunk.token_ids), answers) == (None, True, [True, False])
    assert [each.finish_reason for each in decoder.step()] == ["cancelled"]
    assert not decoder.cancel(number)
    assert decoder.allocator.num_free == decoder.allocator.capacity


def test_waiting_while_nothing_runs_is_an_error_that_names_the_request(generator: TextGenerator):
    """Blocks that are nobody's, as an engine's own code may take them, are never given back."""
    decoder = generator.decoder
    taken = decoder.allocator.allocate(9)
    with pytest.raises(CapacityError, match=r"request \d+ needs 3 KV blocks, 2 of 11 are free, and no request runs"):
        decoder.generate([requests()[0]])
    first, second = [decoder.add(each) for each in (requests()[2], requests()[3])]
    decoder.allocator.reset()
    taken = decoder.allocator.allocate(9)
    ended = {}
    while decoder.num_unfinished:
        with suppress(CapacityError):
            ended |= {chunk.request: chunk.finish_reason for chunk in decoder.step() if chunk.finish_reason}
    assert ended == {first: "failed", second: "length"}
    decoder.allocator.free(taken)
    assert decoder.allocator.num_free == decoder.allocator.capacity


@pytest.mark.parametrize("hold", ["closed", "left", "stopped"])
def test_a_stream_that_was_left_gives_its_blocks_back_by_a_statement(generator: TextGenerator, monkeypatch, hold):
    """Whatever still holds its generators: the frame of a closed one lives on in Python 3.12.3, say."""
    decoder, held = generator.decoder, []
    original = type(decoder).stream

    def holding(self, requests):
        held.append(original(self, requests))
        return held[-1]

    monkeypatch.setattr(type(decoder), "stream", holding)
    alone = decoder.generate([PROBE])
    if hold == "closed":
        chunks = generator.stream(requests())
        next(chunks)
        chunks.close()
    else:
        stops = generator.tokenizer.decode([decoder.generate([requests()[0]])[0].token_ids[2]])
        with generator.stream_text(requests()[0], stop=stops if hold == "stopped" else ()) as pieces:
            for _ in pieces:
                if hold == "left":
                    break
            if hold == "stopped":
                assert decoder.allocator.num_free == decoder.allocator.capacity
    assert decoder.allocator.num_free == decoder.allocator.capacity
    assert len(held) == 1
    assert decoder.generate([PROBE]) == alone


def test_one_text_stream_read_by_two_threads_is_one_line(generator: TextGenerator, monkeypatch):
    """The second thread reads, and closes, where the first one waits for a round."""
    read, said = generator.decoder.rounds._read, []
    with generator.stream_text(requests()[0]) as pieces:

        def interrupted(unread):
            for use in (lambda: next(pieces), pieces.close):
                thread = threading.Thread(target=lambda use=use: said.append(error_of(use)))
                thread.start()
                thread.join()
            return read(unread)

        monkeypatch.setattr(generator.decoder.rounds, "_read", interrupted)
        list(pieces)
        monkeypatch.undo()
    assert len(pieces.token_ids) == requests()[0].max_tokens
    assert {type(each) for each in said} == {ConfigError}
    assert {str(each).partition(": ")[2].partition(",")[0] for each in said} == {"another call runs"}


def error_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None
