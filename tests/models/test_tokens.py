"""Tokenizer, end-of-text tokens and sampling defaults of a folder, against transformers' tokenizer of the same one."""

import json
from pathlib import Path

import pytest
from changed_folders import refused
from specgraph_models.checkpoints.tokenizer import tokenizer_call
from specgraph_models.checkpoints.tokens import read_tokenizer, sampling_defaults, shown_stops, stop_token_ids
from specgraph_run.text.load import shipped_pair

SHIPPED = shipped_pair()[0] / "tokenizer.json"
NEXT = 2048
"""Tokens of the shipped tokenizer."""
TEXTS = (
    "hello", "<|a|> hello <|b|>", "a <|a|>b", "x <|b|> y", "<|endoftext|><|a|>", " <|a|> ",
    "def read_chunk(self, size):\n    return self.stream.read(size) if size else b''\n",
)  # fmt: skip
TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "<|endoftext|>",
}  # fmt: skip


def added(content, **flags):
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": content, **plain, **flags}


@pytest.fixture
def write(tmp_path):
    """`write(in_tokenizer, config, settings)`: the shipped tokenizer with more tokens and other settings."""

    def make(in_tokenizer=(), config=None, settings=None):
        content = json.loads(SHIPPED.read_text()) | (settings or {})
        content["added_tokens"] += [{"id": NEXT + i, **token} for i, token in enumerate(in_tokenizer)]
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return make


A, B = added("<|a|>", special=True), added("<|b|>")


@pytest.mark.parametrize(
    ("in_tokenizer", "config", "settings"),
    [
        ([], {}, {}),
        ([A, B], {}, {}),
        ([], {"added_tokens_decoder": {str(NEXT): A, str(NEXT + 1): B}}, {}),
        ([], {"added_tokens_decoder": {str(NEXT): A | {"lstrip": True, "rstrip": True}}}, {}),
        ([added("<|a|>")], {"added_tokens_decoder": {str(NEXT): A}}, {}),
        ([added("<|a|>"), B], {"eos_token": "<|b|>", "bos_token": "<|a|>"}, {}),
        ([], {}, {"truncation": TRUNCATION}),
        ([], {}, {"padding": PADDING}),
    ],
    ids=[
        "shipped", "in tokenizer.json", "in the other only", "that take the spaces", "special in the other", "named",
        "truncation", "padding",
    ],
)  # fmt: skip
def test_as_transformers_reads_the_folder(in_tokenizer, config, settings, write):
    """Also without what its last user batched training texts with."""
    transformers = pytest.importorskip("transformers")
    folder = write(in_tokenizer, config, settings)
    ours, theirs = read_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).ids == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ({str(NEXT + 3): added("<|a|>")}, "'<|a|>' the id 2051, and the next free one in tokenizer.json is 2048"),
        ({"x": added("<|a|>")}, "not a token"),
        ({"2048": 3}, "not a token"),
        ([1], "should be a mapping"),
        ({"9" * 5000: added("<|a|>")}, "not a token"),
        ({"\u0662\u0660\u0664\u0668": added("<|a|>")}, "not a token"),
        ({str(NEXT): added("\ud800")}, "not a token"),
        ({str(NEXT): added("<|a|>", lstrip=3)}, "are true or false"),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(listed, words, write):
    with refused(words):
        read_tokenizer(write(config={"added_tokens_decoder": listed}))


@pytest.mark.parametrize("key", ["eos_token", "image_token", "extra_special_tokens", "added_tokens.json"])
def test_tokens_with_half_a_character_are_refused(key, write):
    content = "a\ud800"
    folder = write(config={key: [content] if key.startswith("extra") else content})
    if key == "added_tokens.json":
        (folder / "tokenizer_config.json").unlink()
        (folder / key).write_text(json.dumps({content: NEXT}))
    with refused("not a token"):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"added_tokens.json": {"<|a|>": "2048"}}, "has the id '2048', which is none"),
        ({"added_tokens.json": {"<|a|>": NEXT + 1}}, "'<|a|>' the id 2049, and the next free one"),
        ({"added_tokens.json": {"<|a|>": 0}}, "'<|a|>' the id 0, which is '<|endoftext|>' in tokenizer.json"),
        ({"special_tokens_map.json": {"eos_token": 3}}, "'eos_token' is 3, not a token"),
        ({"special_tokens_map.json": {"extra_special_tokens": 3}}, "should be a list or a mapping"),
    ],
)
def test_other_files_of_tokens_that_cannot_be_read(files, words, write):
    folder = write()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    with refused(words):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fix_mistral_regex": True}, True),
        ({"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}, True),
        ({"clean_up_tokenization_spaces": True}, False),
        ({"fix_mistral_regex": False, "add_bos_token": True, "legacy": False}, False),
    ],
)
def test_settings_that_are_not_applied_are_said(config, said, write, caplog):
    """`clean_up_tokenization_spaces` is one only of other models than BPE; what transformers ignores is none."""
    read_tokenizer(write(config=config))
    assert ("is not applied" in caplog.text) == said


REPLACE = {"type": "Replace", "pattern": {"Regex": ".+"}, "content": ""}
STRIP = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
PANICS = {
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "template without its token": {
        "post_processor": {
            "type": "TemplateProcessing", "pair": [], "special_tokens": {},
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        }
    },
    "retries": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    },
    "strip of nothing": {"decoder": {"type": "Sequence", "decoders": [REPLACE, {"type": "Fuse"}, STRIP]}},
}  # fmt: skip
"""Settings at which the package's own code panics: while it is read, at any text, at one text, and at any token."""


@pytest.mark.parametrize("settings", PANICS.values(), ids=PANICS.keys())
def test_a_panic_of_the_package_is_one_error(settings, write):
    with refused("tokenizer"):
        tokenizer = read_tokenizer(write(settings=settings))
        tokenizer.decode(tokenizer.encode("a" * 60 + "!").ids)


def test_an_interrupt_is_none():
    with pytest.raises(KeyboardInterrupt), tokenizer_call(Path("a"), "can't"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[" * 9999])
def test_a_tokenizer_that_cannot_be_read(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with refused("tokenizer.json cannot be read"):
        read_tokenizer(tmp_path)


def test_merges_that_would_abort_the_process(write):
    """tokenizers 0.23.3 cuts a merge inside a character and aborts; this must come before it."""
    model = json.loads(SHIPPED.read_text())["model"] | {"continuing_subword_prefix": "x"}
    with refused("tokenizer.json", "does not continue with the prefix 'x'"):
        read_tokenizer(write(settings={"model": model}))


@pytest.mark.parametrize(
    "model",
    [
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"},
        {
            "type": "WordPiece", "vocab": {"a": 0}, "unk_token": "<unk>", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "<unk>"},
        {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None},
    ],
    ids=lambda model: model["type"],
)  # fmt: skip
def test_an_unknown_token_that_is_not_in_the_vocabulary(model, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with refused("tokenizer.json", "unknown token should be in its vocabulary"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("value", [True, -1, 64, 1.0, "end", [3, True], [[3]]])
def test_eos_token_ids_that_are_none(value, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with refused("generation_config.json", "eos_token_id"):
        stop_token_ids(tmp_path, 64)


MAP = "special_tokens_map.json"


@pytest.mark.parametrize(
    ("in_tokenizer", "config", "more"),
    [
        ([A], {"eos_token": "<|a|>"}, {}),
        ([A, B], {}, {"eos_token": added("<|b|>", special=True)}),
        ([A], {}, {"eos_token": "<|a|>"}),
        ([A, B], {"eos_token": "<|a|>"}, {"eos_token": "<|b|>"}),
        ([], {"eos_token": "<|a|>", "added_tokens_decoder": {str(NEXT): A}}, {"eos_token": "<|endoftext|>"}),
        ([], {"eos_token": "def"}, {}),
    ],
    ids=["by name", "as an object", "in the map", "the map goes first", "the map is not read", "a plain token"],
)  # fmt: skip
def test_the_tokenizers_end_ends_a_text_too(in_tokenizer, config, more, write):
    """It stands behind `eos_token_id`, as in vLLM and SGLang; transformers' tokenizer says which token it is."""
    transformers = pytest.importorskip("transformers")
    folder = write(in_tokenizer, config)
    (folder / MAP).write_text(json.dumps(more))
    (folder / "config.json").write_text('{"eos_token_id": [9, 5]}')
    end = transformers.PreTrainedTokenizerFast.from_pretrained(folder).eos_token_id
    assert end not in (0, None)
    assert stop_token_ids(folder, NEXT + 2) == (9, 5, end)
    assert stop_token_ids(folder, end) == (9, 5), "the model can't generate it"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    assert stop_token_ids(folder, NEXT + 2) == (end,)


def test_what_ends_a_text_is_said(write):
    tokenizer = read_tokenizer(write([A]))
    assert shown_stops(tokenizer, (NEXT, 0, 9999)) == "texts end at <|a|> (2048), <|endoftext|> (0), token (9999)"
    assert shown_stops(tokenizer, ()) == "no token ends a text (there is no eos_token_id)"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, "do_sample=True, temperature=0.6, top_p=0.9"),
        ({"repetition_penalty": 1.05, "eos_token_id": 1}, "repetition_penalty=1.05"),
        ({"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": None}, ""),
    ],
)
def test_defaults_that_are_not_applied_are_said(values, said, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert sampling_defaults(tmp_path) == said
