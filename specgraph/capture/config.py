"""The limits and choices that a target and its drafter share, checked before anything touches the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from specgraph.capture.dispatch import capture_sizes, prefill_sizes
from specgraph.capture.lowering import GraphMode
from specgraph.errors import ConfigError
from specgraph.options import Fallback, LoweringChoice, ModeChoice


def check_count(name: str, value: object, least: int) -> None:
    """Refuse what is no integer, True and False too, and integers below `least`.

    Raises:
        ConfigError: naming the field and its value.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Limits of one runner, and which passes it runs from graphs.

    Raises:
        ConfigError: a number is out of range.
    """

    max_num_requests: int
    """The largest batch."""
    max_model_len: int
    """Tokens of the longest request, prompt included."""
    block_size: int = 16
    """Tokens per KV block."""
    capture_sizes: Sequence[int] | None = None
    """Numbers of requests to capture; by default a ladder up to max_num_requests."""
    prefill_sizes: Sequence[int] | None = None
    """Rows of prefill passes to capture, the last one the longest; by default a ladder up to 512."""
    mode: ModeChoice = "auto"
    """Which passes run from graphs; "auto" is the fastest that the platform allows."""
    lowering: LoweringChoice = "auto"
    """How the draft loop becomes graph launches; "auto" is the strongest that goes with the mode."""
    fallback: Fallback = "error"
    """What to do with a batch larger than every captured size."""
    check_inputs: bool = False
    """Compare the addresses of all that a graph reads before every replay; some microseconds per launch."""
    debug: bool = False
    """Check every batch on the host before a propose, which waits for the device: the values of token ids, counts,
    positions, block ids and hidden states; that no two requests write one block; and, once this drafter has prefilled
    a prompt, that it has written the key of every position before a request's rows."""

    def __post_init__(self) -> None:
        for name, least in (("max_num_requests", 1), ("max_model_len", 2), ("block_size", 1)):
            check_count(name, getattr(self, name), least)
        prefill_sizes(self.max_model_len, self.prefill_sizes)
        sizes = capture_sizes(self.max_num_requests, self.capture_sizes)
        decode = "auto" if self.mode == "auto" else GraphMode.named(self.mode).decode
        if self.fallback == "error" and "eager" not in (self.lowering, decode) and sizes[-1] < self.max_num_requests:
            raise ConfigError(
                f"the largest capture size is {sizes[-1]}, batches go up to max_num_requests = "
                f"{self.max_num_requests}, and fallback is 'error'. Capture {self.max_num_requests} too, lower "
                "max_num_requests, or allow fallback='eager'."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of requests to capture, ascending."""
        return capture_sizes(self.max_num_requests, self.capture_sizes)

    @property
    def scratch_tokens(self) -> int:
        """KV slots that each request has behind max_model_len tokens; none where no trees are drafted."""
        return 0

    @property
    def prefill_rows(self) -> tuple[int, ...]:
        """Rows of prefill passes, ascending."""
        return prefill_sizes(self.max_model_len, self.prefill_sizes)
