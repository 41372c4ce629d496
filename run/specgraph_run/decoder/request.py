"""A generation request, its results, and the decoder's state of it while it runs."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from typing import Literal

from specgraph.errors import ConfigError
from specgraph.validation import Count, checked_fields
from specgraph_run.options import Penalty, RepetitionPenalty, Share, Temperature, TopK, TopP, check_temperature

FinishReason = Literal["stop", "length", "refused", "cancelled", "failed"]

NUMBERS = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Sampling parameters of a request besides temperature, seed and logit_bias."""

UNSUPPORTED: Mapping[str, str] = {
    "num_beams": "beams are compared after each token, and a draft has one continuation",
    "typical_p": "which tokens are kept depends on the entropy; use top_p or min_p",
    "no_repeat_ngram_size": "it bans tokens by the last ones, which drafts change row by row; use penalties",
    "bad_words_ids": "sequences of tokens cannot be banned; single tokens can, with logit_bias",
    "guided_json": "grammars are not followed; constrain the output elsewhere",
    "n": "a request has one sequence; TextGenerator.requests and text take n",
    "best_of": "give the request several times with other seeds, and compare their logprobs",
    "stop": "give stop strings to stream_text",
    "skip_special_tokens": "a request is of tokens; stream_text and text take skip_special_tokens",
}
"""Parameters of other servers that are not supported, and the reason or the alternative."""


@checked_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, and how to continue it.

    Raises:
        ConfigError: the prompt is empty, a value is of another type, or a number is out of range.
    """

    prompt_token_ids: Sequence[int]
    max_tokens: Count
    """The largest number of tokens to generate."""
    temperature: Temperature = 0.0
    """0 is greedy; sampling needs at least MIN_TEMPERATURE."""
    seed: int | None = None
    """Sampling with the same seed gives the same tokens in any batch, as long as rounds have the same K. With
    `draft_schedule` or K "auto" the batch decides K, and with "auto" measured times too. Another K gives other tokens
    of the same distribution, since a token's place in a draft decides how it is drawn. Requests of one seed share their
    noise. None: the decoder gives the request a seed that no other one gets: -1, -2 ... in the order in which requests
    without a seed come (data parallel ranks take turns). `Chunk.seed` tells it. So such requests are independent, the
    same request later gets another text, and the same program repeats. Fits in 64 bits, signed."""
    stop_token_ids: Sequence[int] = ()
    """Generation ends after any of these tokens. Each fits in 64 bits, signed."""
    top_k: TopK = 0
    """Sample from this number of most likely tokens; 0 for all. This field and the fields below need a decoder with
    `sampling_parameters`. `adjust_logits` documents the order in which they apply."""
    top_p: TopP = 1.0
    """Sample from the smallest set of most likely tokens that together have this probability."""
    min_p: Share = 0.0
    """Sample from tokens with at least this share of the largest probability."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Divides positive logits and multiplies negative ones, for tokens of the prompt and the output."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens of the output."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from the logit of a token for each time that it is in the output."""
    logit_bias: Mapping[int, Penalty] = field(default_factory=dict[int, float])
    """Added to the logits of tokens, by token id."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ConfigError("the prompt has no tokens")
        check_temperature(self.temperature)

    @property
    def parameters(self) -> dict[str, object]:
        """The sampling parameters, besides temperature and seed, that differ from their defaults, by name."""
        defaults = {each.name: each.default for each in fields(self)}
        given = {name: value for name in NUMBERS if (value := getattr(self, name)) != defaults[name]}
        return {**given, "logit_bias": self.logit_bias} if self.logit_bias else given


@dataclass(slots=True)
class Chunk:
    """Tokens of one request that one decoder step hands out."""

    request: int
    """The request's id from `add`, or its index in the call of `stream`."""
    token_ids: list[int]
    num_accepted: int
    """Draft tokens that the target accepted. They come first in `token_ids`; a stop token or the limit may cut them."""
    finish_reason: FinishReason | None = None
    message: str = ""
    """The reason of a refusal or a failure, to be read by a person."""
    logprobs: list[float] = field(default_factory=list[float])
    """One per token under the target's own distribution, before any sampling parameter. Empty without
    `DecoderOptions.logprobs`."""
    seed: int | None = None
    """The seed that the request is sampled with: its own or the decoder's. None if the request is greedy."""


@dataclass(slots=True)
class Generation:
    """All tokens generated for one request."""

    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    message: str = ""
    logprobs: list[float] = field(default_factory=list[float])
    """One per token, as in `Chunk`."""
    seed: int | None = None
    """The seed of `Chunk`. A request with it gets the same tokens again."""


@dataclass(slots=True, eq=False)
class Running:
    """An unfinished request."""

    index: int
    """The request's id."""
    request: Request
    seed: int
    """The request's own seed, or the one that the decoder gave it."""
    max_model_len: InitVar[int]
    blocks: list[int] = field(default_factory=list[int])
    """KV blocks; empty while the request waits."""
    token_ids: array[int] = field(init=False)
    """Prompt and output; an int64 array, which grows faster than a list. The KV of the last token is not cached yet."""
    limit: int = field(init=False)
    """The length of `token_ids` at which the request ends."""
    row: int = 0
    """The request's row in the last round: the index of its draft tokens, block table, temperature and seed."""

    slot: int = 0
    """The request's slot among the states of recurrent layers. 0 while it waits, and without such layers."""

    num_sampled: int = 0
    """The number of tokens that the last round sampled, before a stop token or the limit cut them."""

    logprobs: list[float] = field(default_factory=list[float])
    """Log-probabilities of the tokens of the last round. Empty if `DecoderOptions.logprobs` is off."""

    stops: frozenset[int] = field(init=False)
    """The request's stop tokens."""

    def __post_init__(self, max_model_len: int) -> None:
        self.stops = frozenset(self.request.stop_token_ids)
        self.token_ids = array("q", list(self.request.prompt_token_ids))
        self.limit = min(len(self.token_ids) + self.request.max_tokens, max_model_len)

    @property
    def sampled_with(self) -> int | None:
        """The seed as `Chunk.seed` has it: None if the request is greedy."""
        return self.seed if self.request.temperature else None

    @property
    def num_left(self) -> int:
        """The number of tokens that the request may still get."""
        return self.limit - len(self.token_ids)

    @property
    def position(self) -> int:
        """The position of the last token, which is the first row of the next verify."""
        return len(self.token_ids) - 1

    def add(self, tokens: list[int]) -> Chunk:
        """Append the tokens that a round sampled: accepted drafts, then one of the target's own. Cut them at a stop
        token or the limit, and return their chunk.
        """
        ids, stops = self.token_ids, self.stops
        ids.extend(tokens)
        over = len(ids) - self.limit
        if over < 0 and (not stops or stops.isdisjoint(tokens)):  # the usual case: nothing to cut
            return Chunk(self.index, tokens, len(tokens) - 1, None, "", self.logprobs, self.sampled_with)
        kept = len(tokens) - max(over, 0)
        stop = next((i for i, token in enumerate(tokens[:kept]) if token in stops), None)
        reason: FinishReason = "length" if stop is None else "stop"
        kept = kept if stop is None else stop + 1
        del ids[len(ids) - len(tokens) + kept :]
        return Chunk(self.index, tokens[:kept], len(tokens) - 1, reason, "", self.logprobs[:kept], self.sampled_with)
