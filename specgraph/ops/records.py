"""Records: named tuples as parameters of ops. A torch op takes tensors and numbers, so each field is one argument."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Union, get_args, get_origin, get_type_hints

from specgraph.errors import ConfigError
from specgraph.validation import shown


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an op as it is declared in Python."""

    name: str
    record: type[tuple[Any, ...]] | None
    """The type of its named tuple. None if the parameter is a tensor or a number."""
    flat: tuple[str, ...]
    """The names of its arguments in the torch op: `name_field` for each field of a record, otherwise `name`."""
    optional: bool


class Parameters:
    """The parameters of one op, in Python and in torch.

    A record is a positional parameter. Its fields are tensors, numbers or None, never records. If a record may be None,
    each of its arguments may be None in torch; if all of them are, the record is None. `signature` is the torch op's,
    with one argument per field, and `written` has the names of the arguments that the op writes.
    """

    def __init__(self, reference: Callable[..., Any], writes: Iterable[str] = ()) -> None:
        """
        Args:
            reference: the function that declares the parameters.
            writes: the parameters ("out"), whole records ("rows") or fields ("rows.positions") that the op writes.
        """
        hints = get_type_hints(reference)
        declared = inspect.signature(reference)
        flat: list[inspect.Parameter] = []
        self.all: list[Parameter] = []
        for parameter in declared.parameters.values():
            name, record, optional = parameter.name, *_record_of(hints[parameter.name])
            if record is None:
                self.all.append(Parameter(name, None, (name,), optional))
                flat.append(parameter.replace(annotation=hints[name]))
                continue
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                raise TypeError(f"{reference.__name__}: the record '{name}' must be a positional parameter")
            fields = get_type_hints(record)
            self.all.append(Parameter(name, record, tuple(f"{name}_{field}" for field in fields), optional))
            flat += [
                parameter.replace(name=f"{name}_{field}", annotation=kind | None if optional else kind)
                for field, kind in fields.items()
            ]
        returned = hints.get("return")
        self.signature = inspect.Signature(flat, return_annotation=None if returned is types.NoneType else returned)
        self.has_records = any(parameter.record is not None for parameter in self.all)
        self._by_name = {parameter.name: parameter for parameter in self.all}
        split = [path.partition(".") for path in writes]
        self.written = tuple(
            argument
            for name, _, field in split
            for argument in ([f"{name}_{field}"] if field else self._by_name[name].flat)
        )

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Convert a call with records to the torch op's positional and keyword arguments."""
        flat: list[Any] = []
        for parameter, value in zip(self.all, args, strict=False):
            flat += _fields(parameter, value)
        named: dict[str, Any] = {}
        for name, value in kwargs.items():
            parameter = self._by_name[name]
            named |= zip(parameter.flat, _fields(parameter, value), strict=True)
        return flat, named

    def with_records(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that takes records: the result takes the torch op's arguments."""
        if not self.has_records:
            return function

        ends = list(accumulate(len(parameter.flat) for parameter in self.all))
        parts = [
            (parameter.record, parameter.optional, end - len(parameter.flat), end)
            for parameter, end in zip(self.all, ends, strict=True)
        ]

        def flat(*args: Any, **kwargs: Any) -> Any:
            given: list[Any] = []
            for record, optional, begin, end in parts:  # runs in every op on the CPU, so it does as little as possible
                if begin >= len(args):
                    break  # torch leaves out arguments at the end that equal their default
                if record is None:
                    given.append(args[begin])
                    continue
                values = args[begin:end] + (None,) * (end - len(args))
                absent = optional and values[0] is None and all(value is None for value in values)
                given.append(None if absent else record(*values))
            return function(*given, **kwargs)

        flat.__signature__ = self.signature  # pyright: ignore[reportFunctionMemberAccess]
        return flat


def _fields(parameter: Parameter, value: Any) -> Iterable[Any]:
    if parameter.record is None:
        return (value,)
    if value is not None and not isinstance(value, tuple):
        raise ConfigError(f"{parameter.name} must be a {parameter.record.__name__}, got {shown(value)}")
    return (None,) * len(parameter.flat) if value is None else value


def _record_of(annotation: Any) -> tuple[type[tuple[Any, ...]] | None, bool]:
    """Return the named tuple in an annotation, or None if it has none, and whether the parameter may be None."""
    union = get_origin(annotation) in (Union, types.UnionType)
    kinds = [kind for kind in get_args(annotation) if kind is not types.NoneType] if union else [annotation]
    record = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, tuple)), None)
    return record, union
