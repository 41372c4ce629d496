"""Options that several commands share, and options made from the fields of a dataclass."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import Field, fields
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from specgraph.errors import ConfigError
from specgraph_run.cli.names import check_platform
from specgraph_run.options import GeneratorOptions, metadata_of

PlatformOption = Annotated[
    str | None, typer.Option(help="NAME or NAME:INDEX; see `specgraph platforms`.", callback=check_platform)
]
TargetOption = Annotated[Path | None, typer.Option(help="Folder or GGUF file of the target. Default: a shipped one.")]
DraftOption = Annotated[
    Path | None, typer.Option(help="Folder of the drafter, a GGUF file, or ngram. A target alone: no drafts.")
]
ModelOption = Annotated[
    str | None, typer.Option(help="A model by name instead of --target: smollm2 (135M parameters, from PyPI).")
]


_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.?)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


def _read_stop(strings: list[str] | None) -> list[str] | None:
    """Return stop strings with their escapes replaced by characters."""
    if not all(strings or ()):
        raise ConfigError("--stop: a stop string is empty")
    return None if strings is None else [_ESCAPE.sub(_unescaped, each) for each in strings]


def _unescaped(found: re.Match[str]) -> str:
    escape = found[1]
    if len(escape) == 5 and not "d800" <= escape[1:].lower() <= "dfff":  # a surrogate is half a character
        return chr(int(escape[1:], 16))
    if escape not in _ESCAPED:
        raise ConfigError(
            f"--stop {found.string}: '{found[0]}' stands for no character; write \\\\ for a backslash; there are also "
            "\\n, \\r, \\t, and \\u with four hexadecimal digits"
        )
    return _ESCAPED[escape]


StopOption = Annotated[
    list[str] | None,
    typer.Option(
        help="End the text before this string, or before a special token by its name; repeatable. \\n, \\r, \\t and "
        "\\uXXXX stand for a character, \\\\ for a backslash.",
        callback=_read_stop,
    ),
]
JsonOption = Annotated[str | None, typer.Option(help="Write JSON to this file, or - for standard output.")]

RANKS = (
    "tensor_parallel",
    "draft_tensor_parallel",
    "decode_context_parallel",
    "data_parallel",
    "enable_expert_parallel",
    "rank_timeout",
)
"""Options of commands that several processes can run together."""

TREES = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
"""Options that make drafts trees."""


def with_options(
    of: type[Any],
    place: str,
    *,
    panel: str = "Options",
    only: Collection[str] = (),
    without: Collection[str] = (),
    **defaults: Any,
) -> Callable[..., Callable[..., None]]:
    """Replace a command's parameter `place` by one option per field of a dataclass. The command gets the object.

    Args:
        of: the dataclass. A field is an option if `metadata_of` finds its text.
        place: the name of the parameter.
        panel: heading of the options in the command's help.
        only: the fields that become options; all by default.
        without: fields that the command sets itself.
        defaults: default values of this command, if they differ from the dataclass.
    """
    offered = [each for each in fields(of) if metadata_of(each) and each.name not in without]
    taken = [each for each in offered if not only or each.name in only]
    kinds = get_type_hints(of)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            values = {each.name: _parsed(each, given.pop(each.name)) for each in taken}
            command(**given, **{place: of(**values)})

        added = [_parameter(each, kinds[each.name], defaults.get(each.name, each.default), panel) for each in taken]
        shown: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            shown += added if name == place else [parameter]
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        return run

    return decorate


with_generator_options = partial(with_options, GeneratorOptions, "options", panel="Generator")
"""`with_options` for `GeneratorOptions`, in the place of the parameter `options`."""


def parse_numbers(option: str, text: str, most: int) -> list[int]:
    """Return the comma-separated numbers of an option.

    Raises ConfigError unless each one is a whole number from 1 to `most`.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > most:
        raise ConfigError(f"{option} {text}: give whole numbers of 1 to {most}, comma-separated")
    return numbers


def _parameter(each: Field[Any], kind: Any, default: Any, panel: str) -> inspect.Parameter:
    metavar = f"[{'|'.join(get_args(kind))}]" if metadata_of(each)["parse"] and get_origin(kind) is Literal else None
    kind = str | None if metadata_of(each)["parse"] else kind
    option = typer.Option(
        *metadata_of(each)["flags"],
        help=metadata_of(each)["help"],
        case_sensitive=False,
        rich_help_panel=panel,
        metavar=metavar,
    )
    annotation = Annotated[kind, option]
    return inspect.Parameter(each.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _parsed(each: Field[Any], value: Any) -> Any:
    parse = metadata_of(each)["parse"]
    if parse is None or value is None:
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"--{each.name.replace('_', '-')} {value}: {error}") from None
