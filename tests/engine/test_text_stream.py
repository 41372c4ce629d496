"""Text from tokens as they come: the pieces are the text of all tokens, characters are whole, stop strings cut."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specgraph.engine.request import Chunk, Request
from specgraph.engine.text_stream import Detokenizer, StopStrings, TextStream
from specgraph.errors import CapacityError, ConfigError

TEXTS = ["naïve 你好, wörld", "🙂🙃 smile  twice", "def f(x):\n    return x", " leading", "a b  c"]


def byte_level() -> Tokenizer:
    """One token per byte, so that every character of more than one byte is split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([], trainer)
    return tokenizer


def words_with_metaspace() -> Tokenizer:
    """As Llama 2 and Mistral: the space belongs to the word after it, and `decode` drops the first one."""
    words = ["the", "quick", "brown", "fox"]
    tokenizer = Tokenizer(models.WordLevel({f"▁{word}": i for i, word in enumerate(words)}, unk_token="▁the"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


BYTES, WORDS = byte_level(), words_with_metaspace()


@pytest.mark.parametrize("text", TEXTS)
@given(data=st.data())
def test_pieces_are_the_text_and_characters_are_whole(text, data):
    ids = BYTES.encode(text).ids
    detokenizer, pieces = Detokenizer(BYTES), []
    while ids:
        count = data.draw(st.integers(1, 4))
        pieces.append(detokenizer.push(ids[:count], final=len(ids) <= count))
        ids = ids[count:]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_the_space_between_prompt_and_text_is_kept():
    prompt, rest = WORDS.encode("the quick").ids, WORDS.encode("brown fox").ids
    detokenizer = Detokenizer(WORDS, prompt)
    assert "".join(detokenizer.push([token]) for token in rest) == " brown fox"
    assert WORDS.decode(rest) == "brown fox"  # what decoding the tokens alone would give


def test_an_incomplete_character_shows_at_the_end_only():
    first, *_ = BYTES.encode("你").ids
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([], final=True) == "\N{REPLACEMENT CHARACTER}"


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
@example(pieces=["abcab"], stop=["c", "b"])
@example(pieces=["abc"], stop=["abc", "b"])
def test_the_text_ends_before_the_first_stop_string(pieces, stop):
    text, strings, shown = "".join(pieces), StopStrings(stop), ""
    for piece in pieces:
        shown += strings.push(piece)
        if strings.found:
            break
    else:
        shown += strings.flush()
    # The oracle reads one character after the other, whatever the pieces: the first stop string whose last character is
    # there ends the text, the longest of those that end there.
    ends = ((end, each) for end in range(len(text) + 1) for each in stop if text[:end].endswith(each))
    first = min(ends, key=lambda found: (found[0], -len(found[1])), default=None)
    assert strings.found == (first is not None)
    assert shown == (text if first is None else text[: first[0] - len(first[1])])


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match="stop string is empty"):
        StopStrings([""])


def stream(text: str, sizes, stop=(), finish="length", stop_token_ids=()):
    """A stream over the tokens of `text` in chunks of these sizes; all but the last token of each were drafted."""
    ids, chunks = BYTES.encode(text).ids, []
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        chunks.append(Chunk(0, ids[:size], size - 1, finish if last else None))
        ids = ids[size:]
    closed = []

    def produce():
        try:
            yield from chunks
        finally:
            closed.append(True)

    request = Request(prompt_token_ids=[1], max_tokens=99, stop_token_ids=stop_token_ids)
    return TextStream(BYTES, request, produce(), stop), closed


def test_accepted_text_is_marked():
    with stream("abcdefg", [1, 3, 3])[0] as texts:
        pieces = list(texts)
    assert [(p.text, p.is_accepted) for p in pieces] == [
        ("a", False),
        ("bc", True),
        ("d", False),
        ("ef", True),
        ("g", False),
    ]
    assert texts.accepted == [2, 2]
    assert (texts.text, texts.finish_reason) == ("abcdefg", "length")


def test_a_stop_string_across_chunks_ends_the_generation():
    texts, closed = stream("one.\n\ntwo three", [1, 4, 4, 4], stop=["\n\n"])
    assert "".join(p.text for p in texts) == "one."
    assert (texts.finish_reason, len(texts.token_ids), closed) == ("stop", 9, [True])


def test_held_back_text_comes_at_the_end_with_its_mark():
    texts, _ = stream("abcd", [1, 3], stop=["cdx"])
    assert [(p.text, p.is_accepted) for p in texts] == [("a", False), ("b", True), ("c", True), ("d", False)]


def test_a_stop_token_is_no_text():
    [token] = BYTES.encode("!").ids
    texts, _ = stream("ab!", [1, 2], finish="stop", stop_token_ids=[token])
    assert "".join(p.text for p in texts) == "ab"
    assert len(texts.token_ids) == 3


def test_leaving_early_stops_and_a_refused_request_is_an_error():
    texts, closed = stream("abcdef", [1, 2, 3])
    with texts:
        next(iter(texts))
    assert closed
    request = Request(prompt_token_ids=[1], max_tokens=1)
    refused = TextStream(BYTES, request)
    with pytest.raises(CapacityError, match="too long"):
        list(refused.push(Chunk(0, [], 0, "refused", "too long")))
