"""Answers in harmony, the format of gpt-oss: messages in channels, of which the last one is for the reader.

An answer is a row of messages, `<|channel|>NAME<|message|>TEXT<|end|>` with `<|start|>assistant` between them. The
channel `analysis` is reasoning, `final` the answer; `commentary` calls tools, or says what comes next.
Source: "OpenAI harmony response format" in OpenAI's cookbook, and the chat template of gpt-oss, which takes the channel
final as `content` of an answer and analysis as its `thinking`, and refuses markers in either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from specgraph_run.decoder.request import Chunk, Request
from specgraph_run.text.stream import TextPiece, TextStream, special_tokens

if TYPE_CHECKING:
    from specgraph_models.checkpoints.tokenizer import Tokenizer

_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_MARKER = re.compile(r"(<\|(?:start|channel|message|constrain|end|return|call)\|>)")
_BEGUN = re.compile(r"<(?:\|\w*\|?)?$")
"""The end of a text that may begin a marker."""


def is_harmony(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer has the markers of harmony."""
    return {_CHANNEL, _MESSAGE} <= {*special_tokens(tokenizer).values()}


class Channels:
    """Tells the channels of an answer apart while its text comes, special tokens included."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._held = ""
        self._channel: str | None = "final"
        """The one that text belongs to; None between messages. Text without any marker is an answer."""
        self._header = ""
        self._shown = False

    def push(self, text: str, *, final: bool = False) -> str:
        """Return what a reader is shown of the text that comes: each channel but the final one under its name."""
        text = self._held + text
        begun = None if final else _BEGUN.search(text)
        self._held = "" if begun is None else begun[0]
        return "".join(map(self._part, filter(None, _MARKER.split(text[: len(text) - len(self._held)]))))

    def message(self) -> dict[str, str]:
        """Return the answer as a message that chat templates take: what is final as content, analysis as thinking."""
        content, thinking = ("\n".join(self._texts.get(name, ())) for name in ("final", "analysis"))
        return {"role": "assistant", "content": content} | ({"thinking": thinking} if thinking else {})

    def _part(self, part: str) -> str:
        """Return what is shown of a marker, or of the text between two of them."""
        if part == _MESSAGE:
            self._channel = (self._header.split() or ["final"])[0]
            self._texts.setdefault(self._channel, []).append("")
            space = "\n\n" if self._shown else ""
            return space if self._channel == "final" else f"{space}{self._channel}: "
        if _MARKER.fullmatch(part):
            if self._channel is not None or part == _CHANNEL:
                self._header = ""  # the name of the next channel; a message may have none
            self._channel = None
            return ""
        if self._channel is None:
            self._header += part
            return ""
        self._shown = True
        texts = self._texts.setdefault(self._channel, [""])
        texts[-1] += part
        return part


class HarmonyStream(TextStream):
    """A stream of one answer, whose pieces are what `Channels` shows. Its `text` is the answer with all markers."""

    def __init__(self, tokenizer: Tokenizer, request: Request, stop: str | Sequence[str] = ()) -> None:
        super().__init__(tokenizer, request, None, stop, skip_special_tokens=False)
        self.channels = Channels()

    def push(self, chunk: Chunk) -> Iterator[TextPiece]:
        """Give the pieces that a round adds; see `TextStream.push`."""
        for piece in super().push(chunk):
            if text := self.channels.push(piece.text):
                yield TextPiece(text, piece.is_accepted)
        if self.finish_reason is not None and (text := self.channels.push("", final=True)):
            yield TextPiece(text, is_accepted=False)
