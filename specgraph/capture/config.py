"""The limits and choices that a target and its drafter share, checked before anything touches the device."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import get_args

from specgraph.capture.dispatch import capture_sizes, prefill_sizes
from specgraph.errors import ConfigError
from specgraph.options import Fallback, LoweringChoice, PrefillChoice, RunnerOptions


def check_count(name: str, value: object, least: int) -> None:
    """Refuse what is no integer, True and False too, and integers below `least`.

    Raises:
        ConfigError: naming the field and its value.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def check_choice(name: str, value: object, choices: object) -> None:
    """Refuse what is none of the values of a Literal.

    Raises:
        ConfigError: naming the field, its value and those that there are.
    """
    if value not in get_args(choices):
        raise ConfigError(f"unknown {name} '{value}'; there are {', '.join(get_args(choices))}")


@dataclass(frozen=True, kw_only=True)
class RunnerConfig(RunnerOptions):
    """Limits of one runner, and which passes it runs from graphs.

    Raises:
        ConfigError: a number is out of range, or an option has no such value.
    """

    max_model_len: int
    """Tokens of the longest request, prompt included."""
    block_size: int = 16
    """Tokens per KV block."""

    def __post_init__(self) -> None:
        for name, least in (("max_num_requests", 1), ("max_model_len", 2), ("block_size", 1)):
            check_count(name, getattr(self, name), least)
        check_choice("decode", self.decode, LoweringChoice)
        check_choice("prefill", self.prefill, PrefillChoice)
        check_choice("fallback", self.fallback, Fallback)
        prefill_sizes(self.max_model_len, self.prefill_sizes)
        sizes = capture_sizes(self.max_num_requests, self.capture_sizes)
        if self.fallback == "error" and self.decode != "eager" and sizes[-1] < self.max_num_requests:
            raise ConfigError(
                f"the largest capture size is {sizes[-1]}, batches go up to max_num_requests = "
                f"{self.max_num_requests}, and fallback is 'error'. Capture {self.max_num_requests} too, lower "
                "max_num_requests, or allow fallback='eager'."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of requests to capture, ascending."""
        return capture_sizes(self.max_num_requests, self.capture_sizes)

    @property
    def scratch_tokens(self) -> int:
        """Return the KV slots that each request has behind max_model_len tokens; none where no trees are drafted."""
        return 0

    @property
    def prefill_rows(self) -> tuple[int, ...]:
        """Return the rows of prefill passes, ascending."""
        return prefill_sizes(self.max_model_len, self.prefill_sizes)
