"""Text while it is generated: whole characters only, stop strings, and the parts that were drafted."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from types import TracebackType

from specgraph_models.checkpoints.tokenizer import Tokenizer

from specgraph.errors import CapacityError, ConfigError
from specgraph.validation import OneCall, one_call
from specgraph_run.decoder.request import Chunk, FinishReason, Generation, Request

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6
"""The largest number of earlier tokens that new tokens are decoded with."""
_LONGEST = 3
"""The largest number of tokens of an incomplete character: a character has up to 4 bytes, a token at least one."""


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the special tokens, which `skip_special_tokens` leaves out of a text: {id: string}."""
    return {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}


class Detokenizer:
    """Decodes tokens as they come. The pieces joined are the text of all tokens, however the tokens are split.

    A tokenizer's `decode` can't be called per token: a character may have several tokens, and some tokenizers drop the
    space before the first word. So new tokens are decoded together with earlier ones, and the known text is cut off. A
    model may emit bytes that are not text, or tokens that decode to nothing, for any length of time: each token is
    still decoded a bounded number of times, and bytes that can't become a character are shown.

    A character belongs to the token that completes it, also if the prompt's last tokens began it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """skip_special_tokens: leave special tokens out of the text, as transformers and vLLM do."""
        self._tokenizer = tokenizer
        self._skipped = frozenset(special_tokens(tokenizer) if skip_special_tokens else ())
        self._begun = ""
        """The text that `decode` shows for an incomplete character at the prompt's end. The next text begins without
        it."""
        prompt, begun = self._kept(prompt_token_ids), 0
        self._follow(prompt)
        while self._known.endswith(_INCOMPLETE) and begun < min(_LONGEST, len(prompt)):
            begun += 1
            self._follow(prompt[: len(prompt) - begun])
        self._ids, self._held = [*self._ids, *prompt[len(prompt) - begun :]], begun
        self._begun = self._behind()

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Return the text that these tokens complete. With `final`, add an incomplete character at the end."""
        shown = self._push(self._kept(token_ids))
        return shown + self._show(self._behind()) if final and self._held else shown

    def _push(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        before = self._ids, self._held
        self._ids, self._held = [*self._ids, *token_ids], self._held + len(token_ids)
        text = self._behind()
        if _INCOMPLETE not in text:
            return self._show(text)
        self._ids, self._held = before
        return "".join(map(self._push_one, token_ids))

    def _push_one(self, token: int) -> str:
        self._ids, self._held = [*self._ids, token], self._held + 1
        text = self._behind()
        if not text.endswith(_INCOMPLETE):
            return self._show(text)
        if self._held <= _LONGEST:
            return ""
        last = self._tokenizer.decode(self._ids[-_LONGEST:], skip_special_tokens=False)
        if not last.endswith(_INCOMPLETE):  # a new character after bytes that are not text
            return self._show(text)
        self._ids, self._known, self._held = self._ids[-_LONGEST:], last[:-1], _LONGEST
        return self._without_begun(text[:-1])

    def _kept(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that may be text: `decode` drops the others before it strips the first token's space."""
        known = self._tokenizer.id_to_token
        return [token for token in token_ids if token not in self._skipped and known(token) is not None]

    def _behind(self) -> str:
        """Return the text of the held tokens."""
        text = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        if text.startswith(self._known):
            return text[len(self._known) :]
        # New bytes that are not text can turn earlier bytes of the same run into bytes that are not text either.
        return self._tokenizer.decode(self._ids[len(self._ids) - self._held :], skip_special_tokens=False)

    def _show(self, text: str) -> str:
        """Return the text of all held tokens, and hold none from now on."""
        # Tokens that decode to nothing, after one with text, are not kept: the next token would then come first, and
        # lose its space.
        is_none = self._known and not text
        self._follow(self._ids[: len(self._ids) - self._held] if is_none else self._ids)
        return self._without_begun(text)

    def _without_begun(self, text: str) -> str:
        same = 0
        while self._begun[same:] and self._begun.startswith(text[: same + 1]) and text[same:]:
            same += 1
        self._begun = self._begun[same:] if same == len(text) else ""
        return text[same:]

    def _follow(self, token_ids: Sequence[int]) -> None:
        """Set the context that later tokens are decoded with: the fewest of these tokens, from the end, that decode to
        whole characters."""
        for count in range(1, _CONTEXT + 1):
            self._ids, self._held = [*token_ids[-count:]], 0
            self._known = self._tokenizer.decode(self._ids, skip_special_tokens=False)
            if self._known and _INCOMPLETE not in self._known:
                return


class StopStrings:
    """Cuts a text before the stop string that is complete first. If several end together, the longest counts.

    So the text is the same however it is split into pieces, and does not depend on the number of accepted drafts.

    Raises:
        ConfigError: a stop string is empty.
    """

    def __init__(self, stop: str | Sequence[str], hidden: Collection[str] = ()) -> None:
        """
        Args:
            stop: the stop strings; a plain string is one stop string.
            hidden: strings of tokens that are left out of the text. A stop string that contains one of them is searched
                in the text with these tokens. Any other stop string is searched in the text alone.
        """
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(strings):
            raise ConfigError("a stop string is empty")
        self._with_hidden = [each for each in strings if any(token in each for token in hidden)]
        self._plain = [each for each in strings if each not in self._with_hidden]
        self._held = ""
        """Text that is held back, hidden tokens included."""
        self._shown: list[int] = []
        """The indices of the characters of `_held` that are text."""
        self.found = False

    def __bool__(self) -> bool:
        return bool(self._plain or self._with_hidden)

    def push(self, text: str, *, hidden: bool = False) -> str:
        """Return the text that is certain to come before any stop string. The rest is held back.

        Args:
            hidden: True if `text` is the string of a token that is left out of the text.
        """
        if not hidden:
            self._shown += range(len(self._held), len(self._held) + len(text))
        self._held += text
        plain = "".join(self._held[place] for place in self._shown)
        whole = range(len(self._held))
        looked_in = [(self._plain, plain, self._shown), (self._with_hidden, self._held, whole)]
        found = [
            (places[start + len(each) - 1], places[start])
            for strings, where, places in looked_in
            for each in strings
            if (start := where.find(each)) >= 0
        ]
        if found:
            self.found = True
            return self._release(min(found)[1])
        begins = [places[len(where) - n] for strings, where, places in looked_in if (n := _begun(strings, where))]
        return self._release(min(begins, default=len(self._held)))

    def flush(self) -> str:
        """Return the text that is held back. Call it when no more text comes."""
        return "" if self.found else self._release(len(self._held))

    def _release(self, count: int) -> str:
        num_shown = bisect_left(self._shown, count)
        text = "".join(self._held[place] for place in self._shown[:num_shown])
        self._held, self._shown = self._held[count:], [place - count for place in self._shown[num_shown:]]
        return text


def _begun(strings: Sequence[str], text: str) -> int:
    """Return the largest number of characters at the end of a text that begin one of these strings."""
    longest = max(map(len, strings), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(each.startswith(text[-size:]) for each in strings)), 0)


def text_of(tokenizer: Tokenizer, request: Request, generation: Generation, *, skip_special_tokens: bool = True) -> str:
    """Return the text of a finished request as `TextStream` gives it: without the prompt and the last stop token."""
    shown = _without_stop_token(generation, request.stop_token_ids)
    detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, skip_special_tokens=skip_special_tokens)
    return detokenizer.push(shown, final=True)


def _without_stop_token(of: Chunk | Generation, stop_token_ids: Collection[int]) -> list[int]:
    """Return the tokens without the stop token that ended them, which is not text."""
    ended = of.finish_reason == "stop" and of.token_ids and of.token_ids[-1] in stop_token_ids
    return of.token_ids[:-1] if ended else of.token_ids


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of the generated text."""

    text: str
    is_accepted: bool
    """True if the part comes from accepted draft tokens. Otherwise the target sampled it."""


class TextStream(OneCall):
    """The text of one request as it is generated: an iterator of its pieces. `TextGenerator.stream_text` makes it.

    It is a context manager: leaving the block before the end stops the generation. While one thread reads or closes it,
    calls of other threads are refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        chunks: Generator[Chunk] | None = None,
        stop: str | Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """
        Args:
            chunks: the chunks of this request. None if the caller gives them to `push`, as with several requests.
            stop: a stop string, or several. The text ends before the one that is complete first. A stop string with a
                special token in it, such as "<|eot_id|>", also ends a text that leaves special tokens out.
            skip_special_tokens: leave special tokens out of the text.
        """
        self.request = request
        self.token_ids: list[int] = []
        """All tokens so far, a stop string's included. The last token is then the one that completes it."""
        self.text = ""
        """All text so far, without the stop string."""
        self.finish_reason: FinishReason | None = None
        """`stop` after a stop token or a stop string, `length` at a limit. None while the text goes on."""
        self.accepted: list[int] = []
        """The number of accepted draft tokens of each verify so far; a stop token or the limit may cut some of them."""
        self.seed = request.seed
        """The request's seed. If it is sampled and has none, the decoder's, from its first chunk on."""
        self._hidden = special_tokens(tokenizer) if skip_special_tokens else dict[int, str]()
        self._chunks, self._stop = chunks, StopStrings(stop, self._hidden.values())
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._marks: deque[tuple[int, bool]] = deque()
        self._stop_token_ids = frozenset(request.stop_token_ids)
        self._started = False
        self._pieces: deque[TextPiece] = deque()
        """Pieces that `__next__` has not returned yet."""

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @one_call
    def close(self) -> None:
        """Stop generating, and free the request's KV blocks. A second call does nothing."""
        if self._chunks is not None:
            self._chunks.close()

    def __iter__(self) -> Iterator[TextPiece]:
        return self

    @one_call
    def __next__(self) -> TextPiece:
        while not self._pieces:
            if self._chunks is None:
                raise StopIteration
            self._pieces += self.push(next(self._chunks))
            if self._stop.found:
                self._chunks.close()
        return self._pieces.popleft()

    def push(self, chunk: Chunk) -> Iterator[TextPiece]:
        """Give the pieces that a decoder step adds.

        After a stop string was found `finish_reason` is "stop", also if the chunk has none: the caller then ends the
        request.
        Raises:
            CapacityError: the request was refused.
        """
        if chunk.finish_reason == "refused":
            raise CapacityError(chunk.message)
        if self._stop.found:  # the request has ended; this round was launched earlier
            return
        if self._started:  # the first chunk is the prefill's token
            self.accepted.append(chunk.num_accepted)
        self._started, self.seed = True, self.seed if chunk.seed is None else chunk.seed
        self.token_ids += chunk.token_ids
        yield from _joined(self._parts(chunk))
        self.finish_reason = "stop" if self._stop.found else chunk.finish_reason
        if self.finish_reason is not None:
            yield from _joined(self._marked(self._stop.flush()))

    def _parts(self, chunk: Chunk) -> Iterator[tuple[str, bool]]:
        """Give the parts of the text that may be shown, each with True if it comes from accepted draft tokens."""
        shown = _without_stop_token(chunk, self._stop_token_ids)
        # With stop strings, decode token by token: the token that completes a stop string is then the last one.
        borders = [*range(len(shown))] if self._stop else [0, min(chunk.num_accepted, len(shown))]
        for begin, end in pairwise([*borders, len(shown)]):
            yield from self._decoded(shown[begin:end], is_accepted=begin < chunk.num_accepted)
            if self._stop.found:
                del self.token_ids[len(self.token_ids) - len(chunk.token_ids) + end :]
                return
        if chunk.finish_reason is not None:
            yield from self._text(self._detokenizer.push([], final=True), is_accepted=False)

    def _decoded(self, token_ids: Sequence[int], *, is_accepted: bool) -> Iterator[tuple[str, bool]]:
        if not token_ids:
            return
        yield from self._text(self._detokenizer.push(token_ids), is_accepted=is_accepted)
        if self._stop and (hidden := self._hidden.get(token_ids[-1])) is not None:
            yield from self._marked(self._stop.push(hidden, hidden=True))

    def _text(self, text: str, *, is_accepted: bool) -> Iterator[tuple[str, bool]]:
        self._marks.append((len(text), is_accepted))
        yield from self._marked(self._stop.push(text))

    def _marked(self, text: str) -> Iterator[tuple[str, bool]]:
        """Split text that may be shown at the borders between accepted and other text."""
        self.text += text
        while text:
            count, is_accepted = self._marks.popleft()
            part, text = text[:count], text[count:]
            if len(part) < count:
                self._marks.appendleft((count - len(part), is_accepted))
            if part:
                yield part, is_accepted


def _joined(parts: Iterable[tuple[str, bool]]) -> Iterator[TextPiece]:
    for is_accepted, same in groupby(parts, itemgetter(1)):
        yield TextPiece("".join(text for text, _ in same), is_accepted)
