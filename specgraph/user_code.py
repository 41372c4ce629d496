"""Finds the line of the user's program that issued an op, and the name that a tensor has there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from operator import is_
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import ConfigError, SpecgraphError, first_line

TORCH = os.path.dirname(os.path.abspath(str(torch.__file__))) + os.sep
"""The folder of torch, whose lines are never named."""
_CORE = os.path.dirname(os.path.abspath(__file__))
_BELOW = (os.path.abspath(__file__), *(os.path.join(_CORE, room) + os.sep for room in ("cpu", "device", "capture")))
"""This file, and the folders of the core that handle every op. The line that issued the op is further out."""
_OURS = frozenset({"specgraph", "specgraph_models", "specgraph_plugin", "specgraph_run"})
"""The packages whose lines are never the user's: the core, and the distributions that were one with it. A backend, a
drafter or an integration is somebody's own code, whoever wrote it."""
_DISPATCH = frozenset({"__torch_dispatch__", "__torch_function__"})


def user_line() -> str:
    """Return `file:line` of the innermost frame outside of torch, `_BELOW` and dispatch handlers."""
    frame = next(_user_frames(), None)
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def raising_line(error: BaseException) -> str:
    """Return `file:line` of an error's innermost frame outside of torch and our packages. Empty if there is none."""
    places = ((frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__) if not _is_ours(frame))
    outside = [f"{name}:{line}" for name, line in places if not name.startswith((TORCH, "<"))]
    return outside[-1] if outside else ""


NONSENSE = (AttributeError, TypeError, ValueError)
"""The exceptions that our code raises if the user's code gave it an object of the wrong type."""


@contextmanager
def users_code(
    what: str,
    error: type[SpecgraphError],
    kinds: tuple[type[Exception], ...] = (Exception,),
    theirs_alone: bool = False,
) -> Generator[None]:
    """Turn an exception that the user's code raises or causes in the block into an `error` of one line with the place.

    Args:
        what: names the failed work in the line.
        kinds: the exceptions to turn.
        theirs_alone: let an exception pass through if no line of the user's code raised it and it is not in `NONSENSE`.
    """
    try:
        yield
    except (SpecgraphError, torch.OutOfMemoryError):
        raise
    except kinds as raised:
        line = raising_line(raised)
        if theirs_alone and not line and not isinstance(raised, NONSENSE):
            raise
        place = f" (at {line})" if line else ""
        raise error(f"{what}{place}: {type(raised).__name__}: {first_line(raised)[:300]}") from raised


@contextmanager
def explained(kinds: tuple[type[Exception], ...], look: Callable[[], object]) -> Generator[None]:
    """If the block fails with one of `kinds`, call `look`, which raises a ConfigError that names the cause. If `look`
    finds none, the block's own exception is raised."""
    try:
        yield
    except kinds as error:
        try:
            look()
        except ConfigError as found:
            if found.__cause__ is None:  # one with a cause: the failed device has failed `look` too
                raise found from error
        raise


def variable_name(tensor: Tensor) -> str:
    """Return the name of `tensor` in the user's program, at the line that issued an op on it: `scale`, or `self.scale`.
    Empty if no variable there is this tensor or shares its memory."""
    for frame in _user_frames():
        for same in (is_, _shares_memory):
            for name, value in _variables(frame):
                if isinstance(value, Tensor) and same(value, tensor):
                    return name
        if not _is_ours(frame):
            break  # this is the caller's own code: frames further out only handed the tensor in
    return ""


def _user_frames() -> Iterator[FrameType]:
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_name not in _DISPATCH and _is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    """Return whether a frame is of one of our packages, by the name of its module: each may be installed elsewhere."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS


@cache
def _is_users(file: str) -> bool:
    return not file.startswith((TORCH, *_BELOW, "<")) and os.path.basename(file) != "contextlib.py"


def _variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the frame's variables with their names, the attributes of its objects, then the module's variables."""
    yield from frame.f_locals.items()
    for name, value in frame.f_locals.items():
        attributes: Mapping[str, Any] = getattr(value, "__dict__", {})
        for part in (attributes, attributes.get("_parameters"), attributes.get("_buffers")):
            yield from ((f"{name}.{key}", each) for key, each in (part or {}).items())
    yield from frame.f_globals.items()


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    if one.device != other.device:
        return False
    try:
        base = one.untyped_storage().data_ptr()
        return base != 0 and base == other.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without a storage
        return False
