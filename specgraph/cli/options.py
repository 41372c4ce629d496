"""Options that several commands share, and how the fields of `EngineOptions` become options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import Field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

import specgraph.options
from specgraph.errors import ConfigError
from specgraph.options import EngineOptions, refuse_former_names

PlatformOption = Annotated[str | None, typer.Option(help="NAME or NAME:INDEX; see `specgraph platforms`.")]
TargetOption = Annotated[Path | None, typer.Option(help="Folder of the target. Default: the shipped pair.")]
DraftOption = Annotated[Path | None, typer.Option(help="Folder of the drafter.")]
JsonOption = Annotated[str | None, typer.Option(help="Write JSON to this file, or - for standard output.")]

RANKS = ("tensor_parallel", "draft_tensor_parallel", "data_parallel", "enable_expert_parallel", "rank_timeout")
"""Options of commands that several processes can run together."""

TREES = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
"""Options that make drafts trees."""

_FORMER = ("lowering", "mode")
"""Former names of options, for which a message says what to write instead."""


def with_engine_options(
    *, only: Collection[str] = (), without: Collection[str] = (), **defaults: Any
) -> Callable[..., Callable[..., None]]:
    """Give a command an option per field of EngineOptions, in the place of its parameter `options`.

    Args:
        only: the fields that the command takes; all by default.
        without: fields that the command sets itself.
        defaults: values of this command, where they differ from those of EngineOptions.
    """
    taken = [each for each in fields(EngineOptions) if each.name not in without and (not only or each.name in only)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            refuse_former_names({name: given.pop(name) for name in _FORMER})
            values = {each.name: _parsed(each, given.pop(each.name)) for each in taken}
            command(options=EngineOptions(**values), **given)

        own = inspect.signature(command, eval_str=True).parameters
        added = [_parameter(each, defaults.get(each.name, each.default)) for each in taken]
        former = [_shown(name, str | None, None, typer.Option(hidden=True)) for name in _FORMER]
        shown: list[inspect.Parameter] = []
        for name, parameter in own.items():
            shown += [*added, *former] if name == "options" else [parameter]
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        return run

    return decorate


def parse_numbers(option: str, text: str) -> list[int]:
    """Return the comma-separated numbers of an option.

    Raises:
        ConfigError: a number is no whole number of at least 1.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{option} {text}: give whole numbers of at least 1, comma-separated")
    return numbers


def _parameter(each: Field[Any], default: Any) -> inspect.Parameter:
    kind = str | None if each.metadata["parse"] else eval(str(each.type), dict(vars(specgraph.options)))
    option = typer.Option(
        *each.metadata["flags"], help=each.metadata["help"], case_sensitive=False, rich_help_panel="Engine"
    )
    return _shown(each.name, kind, default, option)


def _shown(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _parsed(each: Field[Any], value: Any) -> Any:
    parse = each.metadata["parse"]
    if parse is None or value is None:
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"--{each.name.replace('_', '-')} {value}: {error}") from None
