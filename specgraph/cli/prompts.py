"""Prompts of `specgraph generate`: an option, a file, standard input, or JSON lines."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from specgraph.errors import ConfigError

DEFAULT = '''def read_chunk(self, size):
    """Read at most size bytes, returned as a bytes object."""
    if self.closed:
        raise ValueError("I/O operation on closed file")
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt and how to continue it."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int


def read_prompts(text: str | None, file: Path | None, lines: Path | None, settings: Prompt) -> list[Prompt]:
    """The prompts that were asked for; the default one if none was.

    Args:
        text: the prompt itself; `-` reads standard input.
        file: holds one prompt; `-` reads standard input.
        lines: holds one JSON object per line with `prompt` and, if wanted, `max_tokens`, `temperature` and `seed`;
            `-` reads standard input.
        settings: for all that a line doesn't say.

    Raises:
        ConfigError: more than one of the three, an unreadable file, or a line that is not such an object.
    """
    given = [each for each in (text, file, lines) if each is not None]
    if len(given) > 1:
        raise ConfigError("give one of --prompt, --prompt-file and --prompts")
    if lines is not None:
        return _json_lines(lines, settings)
    if text is None and file is None:
        return [replace(settings, prompt=DEFAULT)]
    return [replace(settings, prompt=_read(Path("-" if text == "-" else str(file))) if text in (None, "-") else text)]


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompt file can't be read: {error}") from None


def _json_lines(path: Path, settings: Prompt) -> list[Prompt]:
    kinds: dict[str, Any] = {"prompt": str, "max_tokens": int, "temperature": (int, float), "seed": int}
    assert set(kinds) == {field.name for field in fields(Prompt)}
    prompts: list[Prompt] = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(values, dict) or "prompt" not in values:
            raise ConfigError(f'{path}, line {number}: give an object such as {{"prompt": "def main():"}}')
        for name, value in values.items():
            if name not in kinds:
                raise ConfigError(f"{path}, line {number}: unknown key '{name}'; there are {', '.join(kinds)}")
            if not isinstance(value, kinds[name]) or isinstance(value, bool):
                raise ConfigError(f"{path}, line {number}: '{name}' is {json.dumps(value)}")
        prompts.append(replace(settings, **values))
    if not prompts:
        raise ConfigError(f"{path} holds no prompt")
    return prompts
