"""Checks of public functions' arguments and public dataclasses' fields by their annotations (`checked`), and a base of
objects that take one call at a time until they are closed (`OneCall`).

Each error is a `ConfigError` of one line, with the argument's name, the allowed values, and the given value.
"""

from __future__ import annotations

import collections.abc
import inspect
import os
import reprlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, wraps
from numbers import Integral, Real
from types import CodeType, FrameType
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from specgraph.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

MOST_ITEMS = 1 << 24
"""The most items of a list or mapping. A `range` could have too many to check each."""
MOST_POSITIONS = 1 << 20
"""The largest max_model_len: a rotary table with a row per position then has half a gigabyte at head_dim 128."""
MOST_REQUESTS = 1 << 16
"""The largest batch, and the most sequences of one prompt."""


@dataclass(frozen=True, slots=True)
class Range:
    """The least and the largest value of a number, written `Annotated[int, Range(1, 8)]`.

    Without a range, an integer must fit in 64 signed bits, and a float must be finite.
    """

    least: float
    most: float = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Gone:
    """A value that an argument took in an earlier version, written `Annotated[Literal["a", "b"], Gone("c", "...")]`."""

    value: str
    instead: str
    """The reason for the removal, and the value to give now. Ends the message to a caller that still gives `value`."""


Count = Annotated[int, Range(1)]
Tokens = Annotated[int, Range(1, MOST_POSITIONS)]
ModelLen = Annotated[int, Range(2, MOST_POSITIONS)]
NgramTokens = Annotated[int, Range(1, 32)]
Requests = Annotated[int, Range(1, MOST_REQUESTS)]
Positive = Annotated[float, Range(1e-9, 1e9)]


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that an annotation allows."""

    what: str
    """The name of these values in a message, with its article."""
    fits: Callable[[Any], bool]
    """Return whether a value has the right type. `take` checks ranges and items."""
    take: Callable[[str, Any], Any] = lambda name, value: value
    """(name, a value that fits) -> the value, with numpy's numbers as Python's. Raises ConfigError if it is wrong."""
    are_plain: Callable[[Sequence[Any]], bool] = lambda values: False
    """Return True if all of these values are right and need no conversion. Faster than `take` for each."""


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Check every argument of a function, before it runs, by its annotation."""
    return _checked(function, function, function.__qualname__.removesuffix(".__init__"))


def checked_fields(cls: type[T]) -> type[T]:
    """Check every field of a dataclass by its annotation, before its `__post_init__`."""
    cls.__init__ = _checked(cls.__init__, cls, cls.__name__)
    return cls


def _checked(function: Callable[P, T], annotated: Any, name: str) -> Callable[P, T]:
    @cache
    def known() -> tuple[inspect.Signature, Mapping[str, Allowed]]:
        """Read the annotations at the first call: imports stay fast, and modules may import each other."""
        hints = get_type_hints(annotated, include_extras=True)
        signature = inspect.signature(function)
        named = [each.name for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        return signature, {each: allowed_by(hints[each]) for each in named if each in hints}

    @wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> T:
        signature, kinds = known()
        try:
            bound = signature.bind(*args, **given)
        except TypeError as error:
            options = suggestion(given, kinds) or f"it takes {', '.join(kinds)}"
            raise ConfigError(f"{name}: {error}; {options}") from None
        for argument, value in bound.arguments.items():
            if argument in kinds:
                bound.arguments[argument] = _take(argument, value, kinds[argument])
        return function(*bound.args, **bound.kwargs)

    return call


def suggestion(given: Iterable[str], known: Iterable[str]) -> str:
    """Return `did you mean NAME by UNKNOWN?` for the first unknown name that is spelt much like a known one, or ""."""
    names = list(known)
    near = ((each, get_close_matches(each, names, n=2)) for each in given if each not in names)
    return next((f"did you mean {' or '.join(close)} by '{each}'?" for each, close in near if close), "")


def check(name: str, value: Any, annotation: Any) -> Any:
    """Return `value`, with numpy's numbers as Python's. Raises ConfigError if the annotation does not allow it."""
    return _take(name, value, allowed_by(annotation))


def _take(name: str, value: Any, kind: Allowed) -> Any:
    if not kind.fits(value):
        raise ConfigError(f"{name} must be {kind.what}, got {shown(value)}")
    return kind.take(name, value)


def shown(value: object) -> str:
    """Describe a value in one short line: a number or text with its type, any other value by its type alone."""
    if isinstance(value, type):
        return f"the class {value.__name__}: give an object of it"
    kind = type(value).__name__
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an integer of {value.bit_length()} bits"
    return f"{reprlib.repr(value)} ({kind})" if isinstance(value, bool | Real | str | bytes) else _article(kind)


def _article(name: str) -> str:
    return "None" if name == "NoneType" else f"a{'n' if name[0] in 'AEIOUaeiou' else ''} {name}"


_ANYTHING = Allowed("anything", lambda v: True, are_plain=lambda values: True)


@cache
def allowed_by(annotation: Any) -> Allowed:
    """Return the kind of an annotation: a number, text, Literal, union, sequence, mapping, function or class.

    For a protocol only None and classes are refused: `draft/head_checks.py` checks its members.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated and isinstance(args[1], Gone):
        return _without(allowed_by(args[0]), args[1])
    if origin is Annotated:
        return _number(args[0], args[1])
    if origin is tuple and args[1:] == (...,):
        return _sequence(allowed_by(args[0]))
    if origin is tuple:
        return _tuple([allowed_by(each) for each in args])
    if origin in (Union, types.UnionType):
        return _union([allowed_by(each) for each in args])
    if origin is Literal:
        choices = ", ".join(map(repr, args))
        return Allowed(f"one of {choices}" if len(args) > 1 else choices, lambda v: isinstance(v, str) and v in args)
    if origin is collections.abc.Sequence:
        return _sequence(allowed_by(args[0]))
    if origin is collections.abc.Mapping:
        return _mapping(*map(allowed_by, args))
    if origin is collections.abc.Callable:
        return Allowed("a function", callable)
    if annotation in (int, float):
        return _number(annotation, Range(-(1 << 63)) if annotation is int else Range(-1e300, 1e300))
    if annotation is str:
        return Allowed("a string", lambda v: isinstance(v, str), _text)
    if annotation is bool:
        return Allowed("True or False", lambda v: isinstance(v, bool))
    if annotation is types.NoneType:
        return Allowed("None", lambda v: v is None)
    return _instance(origin or annotation)


def _number(of: type[int] | type[float], limits: Range) -> Allowed:
    abstract: Any = Integral if of is int else Real

    def take(name: str, value: Any) -> int | float:
        if not limits.least <= value <= limits.most:
            limit = f"at most {limits.most}" if value > limits.most else f"at least {limits.least}"
            raise ConfigError(f"{name} must be {limit}, got {shown(value)}")
        return of(value)

    def are_plain(values: Sequence[Any]) -> bool:
        same = set(map(type, values)) <= {of}
        return same and (not values or (limits.least <= min(values) and max(values) <= limits.most))

    what = "an integer" if of is int else "a number"
    return Allowed(what, lambda v: isinstance(v, abstract) and not isinstance(v, bool), take, are_plain)


def _without(kind: Allowed, gone: Gone) -> Allowed:
    def take(name: str, value: Any) -> Any:
        if not kind.fits(value):
            raise ConfigError(f"{name} {gone.value!r} is gone, and must be {kind.what}: {gone.instead}")
        return kind.take(name, value)

    return Allowed(kind.what, lambda v: kind.fits(v) or (isinstance(v, str) and v == gone.value), take)


def _text(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} must be text that UTF-8 can encode, got {shown(value)}") from None
    return value


def _union(kinds: Sequence[Allowed]) -> Allowed:
    def take(name: str, value: Any) -> Any:
        return next(kind for kind in kinds if kind.fits(value)).take(name, value)

    return Allowed(" or ".join(kind.what for kind in kinds), lambda v: any(kind.fits(v) for kind in kinds), take)


def _sequence(item: Allowed) -> Allowed:
    def take(name: str, values: Sequence[Any]) -> Sequence[Any]:
        """Return a copy, which later changes of the caller's list don't reach. A list of anything is not copied."""
        _check_length(name, values)
        if item is _ANYTHING:
            return values
        copy = tuple(values)
        if item.are_plain(copy):
            return copy
        return tuple(_take(f"{name}[{place}]", value, item) for place, value in enumerate(copy))

    def fits(value: Any) -> bool:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)

    return Allowed("a list" if item is _ANYTHING else f"a list (each item {item.what})", fits, take)


def _tuple(items: Sequence[Allowed]) -> Allowed:
    def take(name: str, values: Sequence[Any]) -> Sequence[Any]:
        return tuple(_take(f"{name}[{place}]", *each) for place, each in enumerate(zip(values, items, strict=True)))

    what = f"a tuple ({', '.join(item.what for item in items)})"
    return Allowed(
        what, lambda v: isinstance(v, Sequence) and not isinstance(v, str | bytes) and len(v) == len(items), take
    )


def _mapping(key: Allowed, item: Allowed) -> Allowed:
    def take(name: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        _check_length(name, values)
        named = ((_take(f"a key of {name}", each, key), value) for each, value in values.items())
        return {each: _take(f"{name}[{each!r}]", value, item) for each, value in named}

    return Allowed(f"a dict ({key.what}: {item.what})", lambda v: isinstance(v, Mapping), take)


def _check_length(name: str, values: Sequence[Any] | Mapping[Any, Any]) -> None:
    try:
        count = len(values)
    except OverflowError:
        count = MOST_ITEMS + 1
    if count > MOST_ITEMS:
        raise ConfigError(f"{name} must have at most {MOST_ITEMS} items, got {_article(type(values).__name__)} of more")


def _instance(cls: Any) -> Allowed:
    if not isinstance(cls, type) or cls in (Any, object):
        return _ANYTHING
    what = _article(cls.__name__)
    if getattr(cls, "_is_protocol", False):
        return Allowed(what, lambda v: v is not None and not isinstance(v, type))
    if not issubclass(cls, tuple):
        return Allowed(what, lambda v: isinstance(v, cls))

    def take(name: str, value: Any) -> Any:
        """Check the fields of a NamedTuple: its constructor accepts anything."""
        for field, hint in get_type_hints(cls).items():
            _take(f"{name}.{field}", getattr(value, field), allowed_by(hint))
        return value

    return Allowed(what, lambda v: isinstance(v, cls), take)


def environment_number(variable: str, default: int, least: int = 0, environ: Mapping[str, str] = os.environ) -> int:
    """Return the whole number in an environment variable, or `default` if it is not set or empty.

    Raises:
        ConfigError: it is no whole number, or is below `least` or above 2 ** 31 - 1.
    """
    text = environ.get(variable, "").strip()
    is_number = text.isascii() and text.isdigit() and len(text) < 11
    if text and not (is_number and least <= int(text) < 1 << 31):
        raise ConfigError(
            f"the environment variable {variable} is {shown(text)}: it must be a whole number of at least {least}; "
            "correct it, or unset it"
        )
    return int(text) if text else default


RUNNING = "another call runs, in another thread or further up in this one: make one call at a time"


class OneCall:
    """An object that takes one call at a time, and none after it is closed. `one_call` decorates its methods.

    An interrupt may end a call before `refusal` is reset. The threads' stacks then show whether a call still runs.
    """

    refusal = ""
    """The reason why no call is accepted now. Empty if a call is accepted."""
    guards: frozenset[CodeType] = frozenset()
    """The code of functions with a local `self`. A frame of one of them on a thread's stack is a running call."""

    def take_turn(self, call: str) -> None:
        """Accept a call although `refusal` is set, if an interrupt ended the earlier call before it could reset it.

        Only a function in `guards` calls this.

        Raises:
            ConfigError: another call runs, or the object is closed.
        """
        if self.refusal is not RUNNING or self._runs(sys._getframe(1)):  # pyright: ignore[reportPrivateUsage]
            raise self._refused(call)

    def refuse_calls(self, reason: str) -> None:
        """Refuse every later call. Raises ConfigError if one runs now: it uses memory that is about to be released."""
        if self.refusal is RUNNING and self._runs(None):
            raise self._refused("close")
        self.refusal = reason

    def _refused(self, call: str) -> ConfigError:
        return ConfigError(f"{call.strip('_')}: {self.refusal or RUNNING}")

    def _runs(self, besides: FrameType | None) -> bool:
        """Return True if any thread is in a call of this object, other than the call of the frame `besides`. If two
        threads ask at once, each sees the other's call."""
        for top in sys._current_frames().values():  # pyright: ignore[reportPrivateUsage]
            frame: FrameType | None = top
            while frame is not None:
                if frame is not besides and frame.f_code in self.guards and frame.f_locals.get("self") is self:
                    return True
                frame = frame.f_back
        return False

    def __reduce__(self) -> str:
        name = type(self).__name__
        raise ConfigError(f"a {name} holds graphs and device memory, and can't be copied or pickled: make another one")


Owner = TypeVar("Owner", bound=OneCall)


def one_call(method: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """Make a method refuse calls while another call of its object runs, and after the object is closed."""

    def call(self: Owner, *args: P.args, **given: P.kwargs) -> T:
        if not self.refusal:
            self.refusal = RUNNING  # no version of the interpreter lets another thread run between the two lines
        else:
            self.take_turn(method.__name__)
        try:
            return method(self, *args, **given)
        except RuntimeError as error:
            refuse_mode(method.__name__, error)
            raise
        finally:
            self.refusal = ""

    OneCall.guards |= {call.__code__}  # the same code object for all methods
    return wraps(method)(call)


def refuse_mode(call: str, error: RuntimeError) -> None:
    """Raise ConfigError if `error` is torch's refusal to write tensors that were made in `torch.inference_mode`."""
    if "inference tensor" in str(error):
        raise ConfigError(
            f"{call}: some of the tensors were made inside torch.inference_mode, and this call comes outside of it: "
            "make all calls inside, or none"
        ) from error
