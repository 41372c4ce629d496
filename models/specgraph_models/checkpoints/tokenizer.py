"""The tokenizer that every text goes through: one of the package tokenizers, with CheckpointError as its only error."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from specgraph.errors import first_line
from specgraph_models.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

_RUST = "pyo3_runtime"
"""The module of PanicException, which no module exports. Rust code that panics raises it; it is a BaseException."""


@contextmanager
def tokenizer_call(source: Path, failure: str) -> Generator[None]:
    """Turn errors of the package tokenizers into CheckpointError: any Exception, and a panic, a BaseException.

    KeyboardInterrupt and SystemExit pass.

    Args:
        source: the file or folder that the tokenizer was read from.
        failure: the words of the error between `source` and the package's reason.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != _RUST:
            raise
        raise CheckpointError(f"{source} {failure}: {first_line(error)}") from None


class Tokenizer:
    """Text to token ids and back, with the methods of `tokenizers.Tokenizer` that are used here.

    Each raises CheckpointError if the tokenizer fails at the given text or tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: Path) -> None:
        """source: the folder or file that the tokenizer was read from, for messages."""
        self._backend, self._source = backend, source

    def encode(self, text: str, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """Return the encoding of a text; its `ids` are the token ids."""
        with tokenizer_call(self._source, "has a tokenizer that can't encode it"):
            return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        with tokenizer_call(self._source, "has a tokenizer that can't decode these tokens"):
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens with their ids, added tokens included."""
        return self._backend.get_vocab()

    def get_vocab_size(self) -> int:
        """Return the number of tokens, added tokens included."""
        return self._backend.get_vocab_size()

    def get_added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        """Return the tokens that are found in text as a whole, by their ids."""
        return self._backend.get_added_tokens_decoder()

    def token_to_id(self, token: str) -> int | None:
        """Return a token's id. None if there is no such token."""
        return self._backend.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        """Return the token of an id. None if there is no such id."""
        return self._backend.id_to_token(index)
