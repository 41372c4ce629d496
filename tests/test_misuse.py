"""An attack from outside: seeded calls of the public names with hostile arguments, at hostile times.

A call gives a result or one line of our own class. After it the object gives the same tokens as before, and a request
that was added is finished or failed by a chunk.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import isfunction, signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_calls import CALLS, PUBLIC, Call, World
from torch import Tensor

from specgraph import KVCache, SpecgraphError

CALLS_PER_NAME = 30
CALLS_PER_CHECK = 7
"""Hostile calls between two good ones, which take longer."""
INTEGER_FOR = {True: ("integer",), False: ()}
HOSTILE: list[Callable[[], Any]] = [
    *((lambda value=value: value) for value in (
        None, True, 1.5, float("nan"), float("inf"), -1, 0, 1, 2**31, 2**63, 10**30, -(10**5000), 1j, "", "x",
        "a\nb" * 300, b"x", "nowhere:7", (), [], [1], [None], [1, True], [1.5], ["a"], [[1]], [10**30], [-1], {},
        {"a": 1}, {1: "a"},
        {-1: 10**30}, range(10**30), int, Path("nowhere"), torch.float64, torch.device("meta"), len,
    )),
    object, lambda: iter([1]), lambda: (i for i in [1]), lambda: np.zeros((2, 2)), lambda: np.float64("nan"),
    lambda: torch.tensor(3), lambda: torch.tensor([float("nan")]), lambda: torch.zeros(0),
    lambda: torch.zeros(3, device="meta"),
]  # fmt: skip
"""Makers of values, as an iterator is used up by one call."""

OF_CACHE: list[Callable[[KVCache], Any]] = [
    lambda c: KVCache(c.value, c.key), lambda c: KVCache(c.key, c.key), lambda c: KVCache(c.key[:1], c.value),
    lambda c: KVCache(c.key[:1].expand_as(c.key), c.value.clone()), lambda c: KVCache(c.key.clone(), c.value[:2]),
    lambda c: KVCache(c.key.as_strided(c.key.shape, (1, 1, 1, 1)), c.value), lambda c: KVCache(c.key, c.key[..., :1]),
    lambda c: KVCache(c.key.to_sparse(), c.value), lambda c: KVCache(c.key.transpose(1, 2), c.value.double()),
]  # fmt: skip
OF_TENSOR: list[Callable[[Tensor], Any]] = [
    Tensor.double, Tensor.bool, Tensor.tolist, Tensor.to_sparse, lambda t: t.to("meta"), lambda t: t.unsqueeze(0),
    lambda t: t.new_zeros(0), lambda t: torch.stack([t, t]), lambda t: torch.full_like(t, -9),
    lambda t: t.new_zeros(()).expand_as(t), lambda t: t.as_strided(t.shape, (1,) * t.dim()),
    lambda t: torch.full_like(t, 2**30), lambda t: t.float() * float("nan"), lambda t: t.numpy(),
]  # fmt: skip


def sort(value: Any) -> str:
    """Tell what a value is to a person."""
    sorts = [
        (bool, "bool"), (Integral, "integer"), (Real, "number"), ((str, Path), "text"), (Tensor, "tensor"),
        (dict, "mapping"), (Sequence, "sequence"), (type(None), "none"),
    ]  # fmt: skip
    return next((name for kind, name in sorts if isinstance(value, kind)), type(value).__name__)


def hostile(rng: random.Random, valid: Any) -> Any:
    """Return a hostile value in place of a valid one, or the valid one with a hostile item."""
    if isinstance(valid, Tensor) and rng.random() < 0.7:
        return rng.choice(OF_TENSOR)(valid.clone())
    if isinstance(valid, KVCache) and rng.random() < 0.7:
        return rng.choice(OF_CACHE)(valid)
    if isinstance(valid, list) and valid and rng.random() < 0.3:
        return [*valid[:-1], hostile(rng, valid[-1])]
    return rng.choice(HOSTILE)()


def is_line(error: SpecgraphError) -> bool:
    """Return whether the message is one line; a platform that is not there is told with the list of all."""
    message = str(error).partition("\nInstalled platforms:")[0]
    return message.strip() == message != "" and "\n" not in message and len(message) < 1000


def show(value: Any) -> str:
    with suppress(ValueError):
        return f"{' '.join(str(value).split()):.60}"
    return f"a {type(value).__name__} of many digits"


def is_nan(value: Any) -> bool:
    return isinstance(value, Real) and value != value


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    with torch.inference_mode():
        yield World(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_hostile_arguments(call: Call, world: World):
    rng = random.Random(call.name)
    before = world.good(call.thing)
    wrong: list[str] = []
    for number in range(CALLS_PER_NAME):
        function, valid = call.make(world)
        changed = {
            name: hostile(rng, valid[name]) for name in rng.sample(list(valid), min(len(valid), rng.choice([1, 1, 2])))
        }
        shown = f"{call.name}({', '.join(f'{name}={show(value)}' for name, value in changed.items())})"
        try:
            given = function(**(valid | changed))
        except SpecgraphError as error:
            wrong += [] if is_line(error) else [f"NOT A LINE {shown}: {error}"]
        except Exception as error:
            if any(callable(value) and callable(valid[name]) for name, value in changed.items()):
                continue  # a function of the user's own raised it
            wrong.append(f"RAW {shown}: {type(error).__name__}: {str(error).splitlines()[:1]}")
        else:
            asked = changed if given != [] else {}  # the settings of no prompt are not read
            wrong += [
                f"ACCEPTED {shown}: {name} is {sort(value)}"
                for name, value in asked.items()
                if is_nan(value)
                or sort(value) not in (sort(valid[name]), *call.take, *INTEGER_FOR[sort(valid[name]) == "number"])
            ]
        if number % CALLS_PER_CHECK == 0 and world.good(call.thing) != before:
            wrong.append(f"OTHER TOKENS after {shown} or the {CALLS_PER_CHECK - 1} calls before it")
    assert not wrong, f"{len(wrong)} of {CALLS_PER_NAME}:\n" + "\n".join(wrong)


def test_every_public_function_is_attacked():
    functions = {name for name, value in PUBLIC.items() if isfunction(value) and signature(value).parameters}
    assert functions <= {call.name for call in CALLS}


MAKE = {"drafter": World.make_drafter, "decoder": World.make_decoder, "generator": World.make_generator}
NEED_NO_GRAPHS = ("generator.request", "generator.requests", "decoder.cancel", "generator.cancel")


@pytest.mark.parametrize("thing", MAKE)
def test_closed(thing: str, world: World):
    open_one = getattr(world, thing)
    closed = MAKE[thing](world)
    closed.close()
    closed.close()
    setattr(world, thing, closed)
    try:
        for call in CALLS:
            if call.thing != thing or call.name in NEED_NO_GRAPHS:
                continue
            with pytest.raises(SpecgraphError, match="closed") as raised:  # noqa: PT012
                function, valid = call.make(world)
                function(**valid)
            assert is_line(raised.value), call.name
    finally:
        setattr(world, thing, open_one)


@pytest.mark.parametrize("thing", ["decoder", "generator"])
def test_re_entrance(thing: str, world: World):
    engine = getattr(world, thing)
    rng = random.Random(thing)
    requests = [world.request, replace(world.request, max_tokens=9, prompt_token_ids=[9, 8])]
    alone = [generation.token_ids for generation in engine.generate(requests)]
    inside: list[Callable[[], Any]] = [
        lambda: engine.generate(requests), lambda: engine.step(), lambda: engine.add(world.request),
        lambda: next(engine.stream(requests)), lambda: engine.cancel(10**9), lambda: world.decoder.capture(),
        lambda: world.generator.text("def", max_tokens=1),
    ]  # fmt: skip
    for _ in range(10):
        given: list[list[int]] = [[], []]
        for chunk in engine.stream(requests):
            given[chunk.request] += chunk.token_ids
            with suppress(SpecgraphError):
                rng.choice(inside)()
        assert given == alone


@pytest.mark.parametrize("thing", ["drafter", "decoder", "generator"])
def test_two_threads(thing: str, world: World):
    before = world.good(thing)
    got: list[Any] = []

    def work(barrier: threading.Barrier) -> None:
        with torch.inference_mode():
            barrier.wait()
            try:
                got.append(world.good(thing))
            except BaseException as error:
                got.append(error)

    for _ in range(10):
        barrier = threading.Barrier(2)
        threads = [threading.Thread(target=work, args=(barrier,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    wrong = [each for each in got if each != before and not (isinstance(each, SpecgraphError) and is_line(each))]
    assert not wrong
    assert len(got) == 20
    assert world.good(thing) == before


def interrupted(call: Callable[[], Any], at: int) -> tuple[Any, int]:
    """Interrupt a call at the `at`-th function of ours that it enters; return what it gave, and how many it entered."""
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event == "call" and "/specgraph/" in frame.f_code.co_filename:
            count += 1
            if count == at:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        return call(), count
    except KeyboardInterrupt:
        return None, count
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("thing", ["drafter", "decoder", "generator"])
def test_keyboard_interrupt(thing: str, world: World):
    before = world.good(thing)
    rng = random.Random(thing)
    functions = interrupted(lambda: world.good(thing), 0)[1]
    for at in sorted(rng.sample(range(1, functions), 15)):
        interrupted(lambda: world.good(thing), at)
        assert world.good(thing) == before, f"after an interrupt in function {at} of {functions}"


def test_keyboard_interrupt_loses_no_request(world: World):
    """A request that was added gets its last chunk, also where a step was interrupted."""
    decoder = world.decoder
    before = world.good("decoder")
    rng = random.Random(5)
    for _ in range(12):
        wanted = {decoder.add(world.request) for _ in range(3)}
        ended: dict[int, str] = {}
        for _ in range(200):
            if not decoder.num_unfinished:
                break
            chunks = interrupted(decoder.step, rng.randrange(1, 400))[0]
            ended |= {chunk.request: chunk.finish_reason for chunk in chunks or [] if chunk.finish_reason}
        assert set(ended) == wanted
        assert world.good("decoder") == before
