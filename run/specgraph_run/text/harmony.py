"""Answers in harmony, the format of gpt-oss: messages in channels. The reader's answer is in the channel `final`.

An answer is a series of messages, `<|channel|>NAME<|message|>TEXT<|end|>`, with `<|start|>assistant` between them. The
channel `analysis` has reasoning, and `final` the answer; `commentary` calls tools or announces the next action.
Source: "OpenAI harmony response format" in OpenAI's cookbook, and the chat template of gpt-oss. The template takes the
text of `final` as an answer's `content` and of `analysis` as its `thinking`, and refuses markers in both.
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
"""The end of a text, if it may be the beginning of a marker."""


def is_harmony(tokenizer: Tokenizer) -> bool:
    """Return True if a tokenizer has the markers of harmony."""
    return {_CHANNEL, _MESSAGE} <= {*special_tokens(tokenizer).values()}


class Channels:
    """Splits an answer into its channels while its text comes. The text must include special tokens."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._held = ""
        self._channel: str | None = "final"
        """The channel of the current text. None between messages. Text without any marker is an answer."""
        self._header = ""
        self._shown = False

    def push(self, text: str, *, final: bool = False) -> str:
        """Return the part of the new text to show a reader. Each channel but `final` is shown under its name."""
        text = self._held + text
        begun = None if final else _BEGUN.search(text)
        self._held = "" if begun is None else begun[0]
        return "".join(map(self._part, filter(None, _MARKER.split(text[: len(text) - len(self._held)]))))

    def message(self) -> dict[str, str]:
        """Return the answer as a message for chat templates: `final` as its content, `analysis` as its thinking."""
        content, thinking = ("\n".join(self._texts.get(name, ())) for name in ("final", "analysis"))
        return {"role": "assistant", "content": content} | ({"thinking": thinking} if thinking else {})

    def _part(self, part: str) -> str:
        """Return the text to show for one part of an answer, which is a marker or the text between two markers."""
        if part == _MESSAGE:
            self._channel = (self._header.split() or ["final"])[0]
            self._texts.setdefault(self._channel, []).append("")
            space = "\n\n" if self._shown else ""
            return space if self._channel == "final" else f"{space}{self._channel}: "
        if _MARKER.fullmatch(part):
            if self._channel is not None or part == _CHANNEL:
                self._header = ""  # the next channel's name follows; a message may have none
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
    """A stream of one answer. Its pieces are the text that `Channels` shows; its `text` has all markers too."""

    def __init__(self, tokenizer: Tokenizer, request: Request, stop: str | Sequence[str] = ()) -> None:
        super().__init__(tokenizer, request, None, stop, skip_special_tokens=False)
        self.channels = Channels()

    def push(self, chunk: Chunk) -> Iterator[TextPiece]:
        """Give the pieces that a decoder step adds; see `TextStream.push`."""
        for piece in super().push(chunk):
            if text := self.channels.push(piece.text):
                yield TextPiece(text, piece.is_accepted)
        if self.finish_reason is not None and (text := self.channels.push("", final=True)):
            yield TextPiece(text, is_accepted=False)
