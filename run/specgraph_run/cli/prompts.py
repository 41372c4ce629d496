"""Prompts of `specgraph generate`: an option, standard input, or JSON lines."""
# ruff: noqa: RUF009

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specgraph.errors import ConfigError
from specgraph.validation import Count, Requests, checked_fields
from specgraph_run.options import (
    Penalty,
    RepetitionPenalty,
    Share,
    Temperature,
    TopK,
    TopP,
    check_temperature,
    option,
)

DEFAULT = '''def read_chunk(self, size):
    """Read at most size bytes, returned as a bytes object."""
    if self.closed:
        raise ValueError("I/O operation on closed file")
'''


_OF_TEXT = ("prompt", "stop", "skip_special_tokens")


@checked_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt and how to continue it."""

    prompt: str = ""
    max_tokens: Count = option(200, "Tokens to generate per prompt, at most.")
    temperature: Temperature = option(0.0, "0 is greedy.")
    seed: int | None = option(
        None,
        "Sampling repeats for the same seed and K; -k auto and --draft-schedule change K. Default: another seed for "
        "each sequence, the same ones in each run.",
    )
    top_k: TopK = option(0, "Sample from this many most likely tokens; 0 for all.")
    top_p: TopP = option(1.0, "Sample from the fewest most likely tokens that together have this probability.")
    min_p: Share = option(0.0, "Sample from tokens with at least this share of the largest probability.")
    repetition_penalty: RepetitionPenalty = option(
        1.0, "Divides positive logits of tokens in prompt and output, multiplies negative ones."
    )
    presence_penalty: Penalty = option(0.0, "Taken off the logits of tokens in the output.")
    frequency_penalty: Penalty = option(0.0, "Taken off a token's logit for each time that the output has it.")
    n: Requests = option(1, "Sequences per prompt; --seed S gives them S, S + 1 ...; needs a temperature.", "-n", "--n")
    stop: str | Sequence[str] = ()
    """Stop strings. `--stop` sets them for all prompts, and takes escapes such as \\n; a prompt in JSON has JSON's."""
    skip_special_tokens: bool = option(True, "Leave special tokens, such as <|im_end|>, out of the text.")

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        object.__setattr__(self, "stop", [self.stop] if isinstance(self.stop, str) else [*self.stop])
        if not all(self.stop):
            raise ConfigError("a stop string is empty")

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments for `TextGenerator.requests`: all fields but the ones about text."""
        return {name: value for name, value in asdict(self).items() if name not in _OF_TEXT}

    @property
    def has_parameters(self) -> bool:
        """True if the prompt needs a decoder with `sampling_parameters`."""
        neutral = Prompt(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed, n=self.n)
        return self.settings != neutral.settings


def read_prompts(text: str | None, lines: Path | None, settings: Prompt) -> list[Prompt]:
    """Return the prompts of `--prompt` or `--prompts`. Without either, return the default prompt.

    Args:
        text: the prompt itself; `-` reads standard input.
        lines: a file with one JSON object per line: `prompt` and, if wanted, other fields of `Prompt`. `-` reads
            standard input.
        settings: the values of fields that a line does not have.

    Raises:
        ConfigError: both are given, the file can't be read, or a line is not such an object.
    """
    if text is not None and lines is not None:
        raise ConfigError("give one of --prompt and --prompts")
    if lines is not None:
        return _json_lines(lines, settings)
    if text == "-":
        text = _text_of(Path("-"))
    return [replace(settings, prompt=DEFAULT if text is None else text)]


def _text_of(path: Path) -> str:
    try:
        if str(path) != "-":
            return path.read_text(encoding="utf-8")
        return sys.stdin.read() if sys.stdin else ""  # sys.stdin is None if it is closed
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of prompts can't be read: {error}") from None


def _json_lines(path: Path, settings: Prompt) -> list[Prompt]:
    content = _text_of(path)
    prompts: list[Prompt] = []
    for number, line in enumerate(content.split("\n"), 1):  # not splitlines: a JSON string may hold U+2028
        if not line.strip(" \t\r"):
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(values, dict) or "prompt" not in values:
            raise ConfigError(f'{path}, line {number}: give an object such as {{"prompt": "def main():"}}')
        try:
            prompts.append(replace(settings, **values))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise ConfigError(f"{path} holds no prompt")
    return prompts
