"""Text while it is generated: whole characters only, stop strings, and which part was drafted."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from specgraph.checkpoints.tokenizer import Tokenizer
from specgraph.engine.request import Chunk, FinishReason, Generation, Request
from specgraph.errors import CapacityError, ConfigError

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6
"""Tokens before the new ones that these are decoded with, at most."""
_LONGEST = 3
"""Tokens that an incomplete character has, at most: a character has 4 bytes, and a token one or more."""


class Detokenizer:
    """Decodes tokens as they come; the pieces together are the text of all tokens.

    A tokenizer's `decode` can't be called per token: a character may consist of several tokens, and some tokenizers
    drop the space before the first word that they decode. So new tokens are decoded together with the ones before
    them, and what was known before is cut off. However long a model emits bytes that are no text, or tokens that decode
    to nothing, a token is decoded a bounded number of times, and bytes that can't become a character are shown.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._follow(prompt_token_ids)

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Return the text that is complete with these tokens; with `final` also an incomplete character at the end."""
        ids, held = [*self._ids, *token_ids], self._held + len(token_ids)
        text = self._tokenizer.decode(ids)
        known = self._known
        if final or not text.endswith(_INCOMPLETE):
            self._follow(ids if text != known else ids[: len(ids) - held])  # the same text: these tokens are none
            return text[len(known) :]
        if len(token_ids) > 1:  # some of them may be whole characters
            return "".join(self.push([token]) for token in token_ids)
        if held <= _LONGEST:
            self._ids, self._held = ids, held
            return ""
        last = self._tokenizer.decode(ids[-_LONGEST:])
        if not last.endswith(_INCOMPLETE):  # a new character, or tokens that are no text, behind what is none
            self._follow(ids)
            return text[len(known) :]
        self._ids, self._known, self._held = ids[-_LONGEST:], last[:-1], _LONGEST
        return text[len(known) : -1]

    def _follow(self, token_ids: Sequence[int]) -> None:
        """Decode what comes next behind the last of these tokens: as few as are a text of whole characters."""
        for count in range(1, _CONTEXT + 1):
            self._ids, self._held = [*token_ids[-count:]], 0
            self._known = self._tokenizer.decode(self._ids)
            if self._known and _INCOMPLETE not in self._known:
                return


class StopStrings:
    """Cuts a text before the stop string that is complete first, of those that end together before the longest.

    So the text is the same in whatever pieces it comes, and does not depend on how many drafts were accepted.

    Raises:
        ConfigError: a stop string is empty.
    """

    def __init__(self, stop: str | Sequence[str]) -> None:
        """stop: a plain string is one stop string."""
        self._stop, self._held = (stop,) if isinstance(stop, str) else tuple(stop), ""
        if not all(self._stop):
            raise ConfigError("a stop string is empty")
        self.found = False

    def push(self, text: str) -> str:
        """Return the text that is certain to precede every stop string; the rest is held back."""
        self._held += text
        found = [(place + len(each), place) for each in self._stop if (place := self._held.find(each)) >= 0]
        if found:
            self.found = True
            return self._release(min(found)[1])
        longest = max((len(each) for each in self._stop), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(each.startswith(self._held[-size:]) for each in self._stop):
                return self._release(len(self._held) - size)
        return self._release(len(self._held))

    def flush(self) -> str:
        """Return the text that is held back, once no more comes."""
        return "" if self.found else self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def text_of(tokenizer: Tokenizer, request: Request, generation: Generation) -> str:
    """Return the text of a finished request as `TextStream` gives it: after its prompt, without a last stop token."""
    shown = _without_stop_token(generation, request.stop_token_ids)
    return Detokenizer(tokenizer, request.prompt_token_ids).push(shown, final=True)


def _without_stop_token(of: Chunk | Generation, stop_token_ids: Collection[int]) -> list[int]:
    """Return the tokens without the stop token that ended them: it is no text."""
    ended = of.finish_reason == "stop" and of.token_ids and of.token_ids[-1] in stop_token_ids
    return of.token_ids[:-1] if ended else of.token_ids


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Some of the generated text."""

    text: str
    is_accepted: bool
    """True if it comes from accepted draft tokens; the rest comes from the target."""


class TextStream:
    """The text of one request as it is generated: iterate over its pieces. Made by `TextGenerator.stream_text`.

    A context manager; leaving it before the end stops the generation.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        chunks: Generator[Chunk] | None = None,
        stop: str | Sequence[str] = (),
    ) -> None:
        """
        Args:
            chunks: of this request; none if the caller hands them to `push`, as one of several requests.
            stop: the text ends before this string, or before the one of these strings that is complete first.
        """
        self.token_ids: list[int] = []
        """All tokens so far, those of a stop string included."""
        self.text = ""
        """All text so far, without the stop string."""
        self.finish_reason: FinishReason | None = None
        """`stop` after a stop token or a stop string, `length` at a limit; None while it goes on."""
        self.accepted: list[int] = []
        """Accepted draft tokens of every verify so far, with those that a stop token or the limit cut off."""
        self.seed = request.seed
        """The request's; where it is sampled and has none, the one that it was given, once its first chunk is there."""
        self._chunks, self._stop = chunks, StopStrings(stop)
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids)
        self._marks: deque[tuple[int, bool]] = deque()
        self._stop_token_ids = frozenset(request.stop_token_ids)
        self._started = False

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop generating; the request's KV blocks are free again. Twice is harmless."""
        if self._chunks is not None:
            self._chunks.close()

    def __iter__(self) -> Iterator[TextPiece]:
        for chunk in self._chunks or ():
            yield from self.push(chunk)
            if self._stop.found:
                self.close()
                return

    def push(self, chunk: Chunk) -> Iterator[TextPiece]:
        """Give the pieces that a round adds.

        `finish_reason` is "stop" after the chunk in which a stop string was found, whatever the chunk says: the caller
        then ends the request.

        Raises:
            CapacityError: the request was refused.
        """
        if chunk.finish_reason == "refused":
            raise CapacityError(chunk.message)
        if self._started:  # the first chunk is the prefill's token
            self.accepted.append(chunk.num_accepted)
        self._started, self.seed = True, self.seed if chunk.seed is None else chunk.seed
        self.token_ids += chunk.token_ids
        shown = _without_stop_token(chunk, self._stop_token_ids)
        yield from self._decode(shown[: chunk.num_accepted], is_accepted=True)
        last = chunk.finish_reason is not None
        yield from self._decode(shown[chunk.num_accepted :], is_accepted=False, final=last)
        self.finish_reason = "stop" if self._stop.found else chunk.finish_reason
        if last:
            yield from self._pieces(self._stop.flush())

    def _decode(self, token_ids: Sequence[int], *, is_accepted: bool, final: bool = False) -> Iterator[TextPiece]:
        if self._stop.found or not (token_ids or final):
            return
        text = self._detokenizer.push(token_ids, final=final)
        self._marks.append((len(text), is_accepted))
        yield from self._pieces(self._stop.push(text))

    def _pieces(self, text: str) -> Iterator[TextPiece]:
        """Split what may be shown at the borders between accepted and other text."""
        self.text += text
        while text:
            count, is_accepted = self._marks.popleft()
            part, text = text[:count], text[count:]
            if len(part) < count:
                self._marks.appendleft((count - len(part), is_accepted))
            if part:
                yield TextPiece(part, is_accepted)
