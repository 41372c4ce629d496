"""A generation request, its results, and the decoder's state of it while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from specgraph.errors import ConfigError

FinishReason = Literal["stop", "length", "refused", "cancelled"]

MIN_TEMPERATURE = 1e-5
"""Below it logits / temperature may leave float32, and the distribution is one-hot anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to generate.

    Raises:
        ConfigError: the prompt is empty, or a number is out of range.
    """

    prompt_token_ids: Sequence[int]
    max_tokens: int
    """The largest number of tokens to generate."""
    temperature: float = 0.0
    """0 is greedy; sampling needs at least MIN_TEMPERATURE."""
    seed: int = 0
    """Sampling repeats for the same seed, whatever the batch. Fits in 64 bits, signed."""
    stop_token_ids: Sequence[int] = ()
    """Generation ends after one of these."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ConfigError("the prompt has no tokens")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {self.temperature}")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed must fit in 64 bits, signed, got {self.seed}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that one round added to one request."""

    request: int
    """The request: its id from `add`, or its index in the call of `stream`."""
    token_ids: list[int]
    num_accepted: int
    """The first `num_accepted` tokens were draft tokens; the rest came from the target."""
    finish_reason: FinishReason | None = None
    message: str = ""
    """Why a request was refused."""


@dataclass(slots=True)
class Generation:
    """All tokens that were generated for one request."""

    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    message: str = ""


@dataclass(slots=True, eq=False)
class Running:
    """An unfinished request."""

    index: int
    """Its id."""
    request: Request
    blocks: list[int]
    """KV blocks; none while it waits."""
    token_ids: list[int]
    """Prompt and output. The KV of the last token is not in the cache yet."""
    row: int = 0
    """Its row in the last round: where its draft tokens, block table, temperature and seed are."""

    num_sampled: int = 0
    """Tokens that its last round sampled, before they were cut."""

    @property
    def position(self) -> int:
        """Position of the last token: the first row of the next target pass."""
        return len(self.token_ids) - 1

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    def room(self, max_model_len: int) -> int:
        """Tokens that it may still be given."""
        return min(self.request.max_tokens - self.num_output, max_model_len - len(self.token_ids))

    def cut(self, tokens: list[int], num_accepted: int, max_model_len: int) -> Chunk:
        """The chunk of a round: its tokens, which are the last of `token_ids`, cut at a stop token or a limit."""
        room = self.room(max_model_len) + len(tokens)
        reason: FinishReason | None = "length" if len(tokens) >= room else None
        for i, token in enumerate(tokens[:room]):
            if token in self.request.stop_token_ids:
                room, reason = i + 1, "stop"
                break
        return Chunk(self.index, tokens[:room], min(num_accepted, room), reason)
