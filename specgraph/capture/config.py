"""The limits and choices that a target and its drafter share, checked before anything touches the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specgraph.capture.dispatch import capture_sizes, prefill_sizes
from specgraph.errors import ConfigError
from specgraph.options import RunnerOptions
from specgraph.validation import ModelLen, Tokens, checked_fields

if TYPE_CHECKING:
    from typing_extensions import Self


@checked_fields
@dataclass(frozen=True, kw_only=True)
class RunnerConfig(RunnerOptions):
    """Limits of one runner, and which passes it runs from graphs.

    Raises:
        ConfigError: a number is out of range, or an option has no such value.
    """

    max_model_len: ModelLen
    """Tokens of the longest request, prompt included."""
    block_size: Tokens = 16
    """Tokens per KV block."""

    def __post_init__(self) -> None:
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
    def limits(self) -> tuple[int, int]:
        """Return max_model_len and block_size, which ops take in this order."""
        return self.max_model_len, self.block_size

    @property
    def max_blocks(self) -> int:
        """Return the columns of a round's block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def prefill_rows(self) -> tuple[int, ...]:
        """Return the rows of prefill passes, ascending."""
        return prefill_sizes(self.max_model_len, self.prefill_sizes)

    def with_prefill_sizes(self, longest: int) -> Self:
        """Return the config with its prefill sizes named: where they are not, those of up to `longest` rows."""
        return replace(self, prefill_sizes=prefill_sizes(self.max_model_len, self.prefill_sizes, longest))
