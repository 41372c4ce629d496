"""`config.json` of a Hugging Face folder as typed values.

A key that is missing, of the wrong type or out of range raises one CheckpointError that names the key and the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgraph.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The key-value pairs of one configuration, and the file (and section) that they came from."""

    values: Mapping[str, Any]
    name: str
    """For messages: the file's path, with the section inside it."""

    def fail(self, key: str, problem: str) -> CheckpointError:
        """The error to raise about `key`."""
        return CheckpointError(f"{self.name}: {key!r} {problem}")

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.values.get(key) is not None

    def section(self, key: str) -> ConfigSource:
        """The mapping stored under `key`; empty when absent."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.fail(key, f"should be a mapping, is {value!r}")
        return ConfigSource(value, f"{self.name}[{key}]")

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer of at least `minimum`."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing; it should be an integer")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"should be an integer, is {value!r}")
        if value < minimum:
            raise self.fail(key, f"should be at least {minimum}, is {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing; it should be a number")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"should be a number, is {value!r}")
        if value <= 0:
            raise self.fail(key, f"should be positive, is {value}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"should be true or false, is {value!r}")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing; it should be a string")
            return default
        if not isinstance(value, str):
            raise self.fail(key, f"should be a string, is {value!r}")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of integers, or None when absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self.fail(key, f"should be a list of integers, is {value!r}")
        return tuple(value)


def read_config(folder: Path) -> ConfigSource:
    """The contents of `folder/config.json`.

    Raises:
        CheckpointError: no such folder or file, or not a JSON mapping.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder that holds config.json and the weights")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise CheckpointError(f"{folder} has no config.json (it holds: {there})") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} should hold a JSON object, holds {type(values).__name__}")
    return ConfigSource(values, str(path))


def refuse_quantised(source: ConfigSource) -> None:
    """Raise when the configuration says that the weights are quantised: only plain floating point is read here."""
    for key in ("quantization_config", "compression_config"):
        if source.has(key):
            section = source.section(key)
            method = section.values.get("quant_method") or section.values.get("format") or "an unnamed method"
            raise source.fail(key, f"says the weights are quantised by {method}; give an unquantised checkpoint")
