"""Text from tokens as they come: the pieces are the text of all tokens, characters are whole, stop strings cut."""

from __future__ import annotations

import os
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specgraph_run.decoder.request import Chunk, Request
from specgraph_run.text.load import shipped_pair
from specgraph_run.text.stream import Detokenizer, StopStrings, TextStream
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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
    """Make one like Mistral's: the space belongs to the word after it, and `decode` drops the first one."""
    words = ["the", "quick", "brown", "fox"]
    tokenizer = Tokenizer(models.WordLevel({f"▁{word}": i for i, word in enumerate(words)}, unk_token="▁the"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Make one like Llama 2's: words that hold their space, and one token for each byte of what is no word."""
    bytes_of_text = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    words = {word: 300 + i for i, word in enumerate(("▁", "▁t", "▁th", "▁the", "▁f", *"thesfoxdn'."))}
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **bytes_of_text, **words}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "f")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def word_pieces() -> Tokenizer:
    """Make one like BERT's."""
    pieces = ["[UNK]", "the", "fox", "##es", "##s", "do", "n", "'", "t", ",", "."]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


PARTS = ["61", "ff", "e4", "bda0", "a0e4bd", "f09f", "99", "82f0", "80", "ffe4"]


def parts_of_characters() -> Tokenizer:
    """Byte-level tokens of several bytes, most of which begin or end within a character: token i is PARTS[i]."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens = ["".join(letters[byte] for byte in bytes.fromhex(part)) for part in PARTS]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES, WORDS, SENTENCES, PIECES = byte_level(), words_with_metaspace(), sentencepiece(), word_pieces()


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids, **options) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **options)

    def __getattr__(self, name: str):
        return getattr(self.tokenizer, name)


def in_pieces(data, tokenizer, prompt, ids, skip=True):
    """The pieces of a text whose tokens come in random numbers, as rounds give them."""
    detokenizer, pieces = Detokenizer(tokenizer, prompt, skip_special_tokens=skip), []
    while ids:
        count = data.draw(st.integers(1, 6))
        pieces.append(detokenizer.push(ids[:count], final=len(ids) <= count))
        ids = ids[count:]
    return pieces


def after(tokenizer, prompt, ids, skip=True):
    """The oracle: the text of all tokens, without as much of it as `decode` shows of the prompt or its beginning."""
    text = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    before = [tokenizer.decode(prompt[:end], skip_special_tokens=skip) for end in range(len(prompt) + 1)]
    return text[max(len(os.path.commonprefix([each, text])) for each in before) :]  # noqa: RUF071 (no paths)


@pytest.mark.parametrize("text", TEXTS)
@given(data=st.data())
def test_pieces_are_the_text_and_characters_are_whole(text, data):
    pieces = in_pieces(data, BYTES, [], BYTES.encode(text).ids)
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [WORDS, SENTENCES, PIECES])
@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_pieces_of_any_tokenizer_are_the_text_behind_the_prompt(tokenizer, data):
    """Words with tokens that decode to nothing between them, and characters that consist of byte tokens."""
    words = data.draw(st.lists(st.sampled_from(["the", " fox", " foxes", " don't", ".", "é", "你", "🙂"]), min_size=2))
    ids = tokenizer.encode("".join(words)).ids
    whole = [i for i in range(1, len(ids)) if not tokenizer.decode(ids[:i]).endswith("\N{REPLACEMENT CHARACTER}")]
    prompt, ids = (lambda at: (ids[:at], ids[at:]))(data.draw(st.sampled_from(whole or [len(ids)])))
    if tokenizer is SENTENCES:
        ids = [*data.draw(st.integers(0, 9)) * [2], *ids]
    assert "".join(in_pieces(data, tokenizer, prompt, ids)) == after(tokenizer, prompt, ids)


def with_special(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy with two more special tokens."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.add_special_tokens(["<|x|>", "<|end|>"])
    return copy


SHIPPED = Tokenizer.from_file(str(shipped_pair()[0] / "tokenizer.json"))
KINDS = {
    "one byte each": BYTES, "byte-level BPE": SHIPPED, "metaspace": WORDS, "byte fallback": SENTENCES,
    "WordPiece": PIECES, "parts of characters": parts_of_characters(),
}  # fmt: skip
SPECIAL = {name: with_special(tokenizer) for name, tokenizer in KINDS.items()}
WRITTEN = ["the", " quick fox", " foxes", " don't", ".", "\n", "é", " 你好", "🙂", "  "]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, derandomize=True, deadline=None)
@given(data=st.data())
def test_text_depends_neither_on_the_pieces_nor_on_the_prompts_end(kind, skip, data):
    """Any words with any number of special tokens between them, cut anywhere: within a character, behind specials."""
    tokenizer = SPECIAL[kind]
    marks = [tokenizer.token_to_id(name) for name in ("<|x|>", "<|end|>")]
    ids = []
    for _ in range(data.draw(st.integers(1, 6))):
        if kind == "parts of characters":
            ids += data.draw(st.lists(st.integers(0, len(PARTS) - 1), max_size=6))
        else:
            ids += tokenizer.encode(data.draw(st.sampled_from(WRITTEN)), add_special_tokens=False).ids
        ids += data.draw(st.sampled_from([0, 0, 1, 2, 9])) * [data.draw(st.sampled_from(marks))]
    cut = data.draw(st.integers(0, len(ids)))
    pieces = in_pieces(data, tokenizer, ids[:cut], ids[cut:], skip)
    assert "".join(pieces) == after(tokenizer, ids[:cut], ids[cut:], skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, derandomize=True, deadline=None)
@given(data=st.data())
def test_any_tokens_are_one_text_in_whatever_pieces(kind, data):
    """Also bytes that are no text, behind a character that was shown before they came."""
    tokenizer = SPECIAL[kind]
    size = tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 1) | st.integers(size - 4, size - 1), max_size=30))
    if kind == "byte fallback":
        of_bytes = st.sampled_from([3 + byte for byte in (0xE4, 0xBD, 0xA0, 0xFF, 0x61)])
        ids = data.draw(st.lists(of_bytes | st.sampled_from([2, 303]), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    alone = Detokenizer(tokenizer, ids[:cut])
    one_by_one = "".join(alone.push([token]) for token in ids[cut:]) + alone.push([], final=True)
    assert Detokenizer(tokenizer, ids[:cut]).push(ids[cut:], final=True) == one_by_one
    assert "".join(in_pieces(data, tokenizer, ids[:cut], ids[cut:])) == one_by_one


@pytest.mark.parametrize("size", [1, 2, 4, 9])
def test_a_character_stays_when_the_bytes_behind_it_are_none(size):
    """`decode` makes none of a run of byte tokens text if one is none; the character before it was shown."""
    ids = [3 + byte for byte in (*"你".encode(), 0xFF)] + SENTENCES.encode("the").ids
    detokenizer = Detokenizer(SENTENCES, SENTENCES.encode("fox").ids)
    pieces = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(pieces) == "你\N{REPLACEMENT CHARACTER} the"


def test_a_character_that_the_prompt_began_is_shown_when_it_is_complete():
    for tokenizer in (BYTES, SENTENCES):
        ids = tokenizer.encode("the 你.").ids
        for cut in range(1, len(ids) + 1):
            shown = Detokenizer(tokenizer, ids[:cut]).push(ids[cut:], final=True)
            whole = tokenizer.decode(ids[:cut]).rstrip("\N{REPLACEMENT CHARACTER}")
            assert whole + shown == "the 你."


@pytest.mark.parametrize("skip", [True, False])
def test_the_space_behind_many_special_tokens_is_kept(skip):
    tokenizer = SPECIAL["metaspace"]
    mark, (the, quick) = tokenizer.token_to_id("<|x|>"), tokenizer.encode("the quick").ids
    shown = "<|x|>" * 9 if not skip else ""
    assert Detokenizer(tokenizer, [the, *9 * [mark]], skip_special_tokens=skip).push([quick], final=True) == " quick"
    detokenizer = Detokenizer(tokenizer, [the], skip_special_tokens=skip)
    assert detokenizer.push([quick, *9 * [mark]]) == f" quick{shown}"
    assert detokenizer.push([quick], final=True) == " quick"


@settings(max_examples=200, derandomize=True)
@given(data=st.data())
def test_bytes_that_are_no_text_come_as_decode_shows_them(data):
    """Any bytes, in a vocabulary whose tokens hold several: most begin or end within a character."""
    tokenizer = parts_of_characters()
    prompt, ids = (data.draw(st.lists(st.integers(0, len(PARTS) - 1), max_size=n)) for n in (3, 40))
    assert "".join(in_pieces(data, tokenizer, prompt, ids)) == after(tokenizer, prompt, ids)


@pytest.mark.parametrize(
    ("tokenizer", "token"), [(BYTES, BYTES.encode("é").ids[0]), (SENTENCES, 3 + 0xFF), (SENTENCES, 2)]
)
def test_a_model_that_emits_no_text_costs_the_same_for_every_token(tokenizer, token):
    """Bytes that are never a character, and special tokens: shown as they come, whatever their number."""
    counting = Counting(tokenizer)
    detokenizer = Detokenizer(counting, tokenizer.encode("the").ids)
    before, shown = counting.decoded, ""
    for _ in range(200):
        shown += detokenizer.push([token])
    assert counting.decoded - before <= 200 * 16
    assert len(shown) >= 190 or token == 2
    assert shown + detokenizer.push([], final=True) == after(tokenizer, [], 200 * [token])
    assert detokenizer.push(tokenizer.encode("the").ids, final=True).strip() == "the"


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


def cut(pieces, stop):
    """The text that is shown of `pieces`, and whether a stop string was found."""
    strings, shown = StopStrings(stop), ""
    for piece in pieces:
        shown += strings.push(piece)
        if strings.found:
            return shown, True
    return shown + strings.flush(), False


def test_the_text_ends_before_the_first_stop_string_in_whatever_pieces():
    """Every text of 5 of these letters, in all pieces, for every one or two stop strings of up to 3 letters.

    The oracle finds each in the whole text: the one that ends first ends the text, the longest of those that end there.
    """
    strings = ["".join(letters) for n in (1, 2, 3) for letters in product("ab", repeat=n)]
    stops = [*((each,) for each in strings), *combinations(strings, 2)]
    borders = [[*chosen, 5] for n in range(5) for chosen in combinations(range(1, 5), n)]
    for text in map("".join, product("ab", repeat=5)):
        splits = [[text[i:j] for i, j in pairwise([0, *ends])] for ends in borders]
        for stop in stops:
            ends = [(text.find(each) + len(each), text.find(each)) for each in stop if each in text]
            wanted = (text[: min(ends)[1]], True) if ends else (text, False)
            for pieces in splits:
                assert cut(pieces, stop) == wanted, (pieces, stop)


@pytest.mark.parametrize(
    ("stop", "pieces", "shown"),
    [
        ("aab", ["aa", "b"], ""),  # of "aa" and "a", both of which may begin it, the longest is held
        ("aab", ["xa", "a", "ab"], "xa"),
        (["ab", "bcd"], ["a", "bc", "d"], ""),
        (["abcd", "bc"], ["ab", "c", "d"], "a"),
        (["b", "ab"], ["a", "b"], ""),
    ],
)
def test_what_may_begin_a_stop_string_is_held(stop, pieces, shown):
    assert cut(pieces, stop) == (shown, True)


NAMES = ("<x>", "<y>")


def of_tokens(tokens, stop):
    """The text of these tokens, of which NAMES are left out, and the number of tokens that came before a stop."""
    strings, shown = StopStrings(stop, NAMES), ""
    for count, token in enumerate(tokens, 1):
        shown += strings.push(token, hidden=token in NAMES)
        if strings.found:
            return shown, count
    return shown + strings.flush(), None


def first_stop(tokens, stop):
    """The oracle of `of_tokens`: looks for all of them again after each character."""
    hidden = [each for each in stop if any(name in each for name in NAMES)]
    units = [(char, token in NAMES, count) for count, token in enumerate(tokens, 1) for char in token]
    for end in range(1, len(units) + 1):
        shown = [place for place in range(end) if not units[place][1]]
        ends = []
        for each in stop:
            places = range(end) if each in hidden else shown
            where = "".join(units[place][0] for place in places)
            if where.endswith(each) and places[-1] == end - 1:
                ends.append(places[len(where) - len(each)])
        if ends:
            text = "".join(units[place][0] for place in shown if place < min(ends))
            return text, units[end - 1][2]
    return "".join(char for char, hides, _ in units if not hides), None


def test_stop_strings_with_tokens_that_are_left_out():
    """Every text of up to 4 of these tokens, for every one or two of these stop strings."""
    strings = ["<x>", "<y>", "a<x>", "<x>b", "a<x>b", "ab", "b", "<x><y>", "a<y>b", "x", "aa<x>"]
    stops = [*((each,) for each in strings), *combinations(strings, 2)]
    for tokens in (each for n in range(1, 5) for each in product(["a", "b", *NAMES], repeat=n)):
        for stop in stops:
            assert of_tokens(tokens, stop) == first_stop(tokens, stop), (tokens, stop)


def test_a_plain_string_is_one_stop_string():
    assert cut(["Each: an E", "ND of text, END"], "END of") == ("Each: an ", True)
    assert [piece.text for piece in stream("an END", [1, 5], stop="END")[0]] == ["a", "n "]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match="stop string is empty"):
        StopStrings([""])
    with pytest.raises(ConfigError, match="stop string is empty"):
        StopStrings("")


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
    assert (texts.finish_reason, len(texts.token_ids), closed) == ("stop", 6, [True])


def test_held_back_text_comes_at_the_end_with_its_mark():
    texts, _ = stream("abcd", [1, 3], stop=["cdx"])
    assert [(p.text, p.is_accepted) for p in texts] == [("a", False), ("b", True), ("c", True), ("d", False)]


def test_a_stop_token_is_no_text():
    [token] = BYTES.encode("!").ids
    texts, _ = stream("ab!", [1, 2], finish="stop", stop_token_ids=[token])
    assert "".join(p.text for p in texts) == "ab"
    assert len(texts.token_ids) == 3


def special_stream(names, stop, skip=True, size=1):
    """A stream of letters, and of special tokens by name, in chunks of `size` tokens."""
    tokenizer = SPECIAL["one byte each"]
    ids = [tokenizer.token_to_id(name) for name in names]
    chunks = [Chunk(0, ids[at : at + size], size - 1) for at in range(0, len(ids), size)]
    chunks[-1].finish_reason = "length"
    request = Request(prompt_token_ids=[1], max_tokens=99)
    return TextStream(tokenizer, request, (each for each in chunks), stop, skip)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    ("stop", "skip", "text", "count"),
    [
        ("<|end|>", True, "abc", 5),
        ("<|end|>", False, "ab<|x|>c", 5),
        ("b<|x|>c", True, "a", 4),
        ("bc", True, "a", 4),  # as the reader of the text sees it
        ("bc", False, "ab<|x|>c<|end|>ab", None),
        ("<|", True, "abcab", None),  # the reader sees none
        ("<|", False, "ab", 3),
        ((), True, "abcab", None),
        ((), False, "ab<|x|>c<|end|>ab", None),
    ],
)
def test_special_tokens_in_text_and_in_stop_strings(stop, skip, text, count, size):
    """The tokens end with the one that completes the stop string, however many came together."""
    names = ["a", "b", "<|x|>", "c", "<|end|>", "a", "b"]
    texts = special_stream(names, stop, skip, size)
    assert "".join(piece.text for piece in texts) == texts.text == text
    assert (texts.finish_reason, len(texts.token_ids)) == ("length" if count is None else "stop", count or len(names))


def test_leaving_early_stops_and_a_refused_request_is_an_error():
    texts, closed = stream("abcdef", [1, 2, 3])
    with texts:
        next(iter(texts))
    assert closed
    request = Request(prompt_token_ids=[1], max_tokens=1)
    refused = TextStream(BYTES, request)
    with pytest.raises(CapacityError, match="too long"):
        list(refused.push(Chunk(0, [], 0, "refused", "too long")))
